#pragma once

/* The library from C99 (and from anything that can call C). The same call as delta_attention_forward; what each operand means
 * is written in delta_attention.h and recurrence.h.
 *
 *     delta_attention_c_args args;
 *     delta_attention_c_args_init(&args, sizeof args);
 *     const int64_t shape[4] = {1, T, H, D}, gates[3] = {1, T, H};
 *     args.q = delta_attention_c_input(q, DELTA_ATTENTION_C_F32, 4, shape);
 *     args.k = delta_attention_c_input(k, DELTA_ATTENTION_C_F32, 4, shape);
 *     args.v = delta_attention_c_input(v, DELTA_ATTENTION_C_F32, 4, shape);
 *     args.beta = delta_attention_c_input(beta, DELTA_ATTENTION_C_F32, 3, gates);
 *     args.out = delta_attention_c_output(out, DELTA_ATTENTION_C_F32, 4, shape);
 *     args.recurrence = delta_attention_c_recurrence_named("delta_net");
 *     if (delta_attention_c_forward(&args, NULL) != DELTA_ATTENTION_C_OK) puts(delta_attention_c_last_error());
 *
 * No exception leaves these functions. Structs start with their size, so that a program keeps working with a library that is
 * newer than its header; always fill them with their _init function first. */

#include <stddef.h>
#include <stdint.h>

#include "delta_attention/version.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum delta_attention_c_status {
  DELTA_ATTENTION_C_OK = 0,
  DELTA_ATTENTION_C_INVALID_ARGUMENT = 1, /* the caller's input is wrong */
  DELTA_ATTENTION_C_UNSUPPORTED = 2,      /* legal, but this kernel, device or build cannot run it */
  DELTA_ATTENTION_C_NO_DEVICE = 3,        /* CUDA tensors, and no CUDA device, driver or kernels */
  DELTA_ATTENTION_C_OUT_OF_MEMORY = 4,
  DELTA_ATTENTION_C_CUDA_ERROR = 5,
  DELTA_ATTENTION_C_INTERNAL = 6 /* a bug in the library */
} delta_attention_c_status;

/* The enumerators below have the values of their C++ twins. Structs hold them as int32_t. */
enum {
  DELTA_ATTENTION_C_F32 = 0,
  DELTA_ATTENTION_C_F16 = 1,
  DELTA_ATTENTION_C_BF16 = 2,
  DELTA_ATTENTION_C_F64 = 3,
  DELTA_ATTENTION_C_I32 = 4,
  DELTA_ATTENTION_C_I64 = 5
};
enum { DELTA_ATTENTION_C_CPU = 0, DELTA_ATTENTION_C_CUDA = 1 };
enum { DELTA_ATTENTION_C_UPDATE_ADDITIVE = 0, DELTA_ATTENTION_C_UPDATE_DELTA = 1 };
enum { DELTA_ATTENTION_C_GATE_NONE = 0, DELTA_ATTENTION_C_GATE_SCALAR = 1, DELTA_ATTENTION_C_GATE_CHANNEL = 2 };
enum {
  DELTA_ATTENTION_C_GATE_SPACE_LOG = 0,
  DELTA_ATTENTION_C_GATE_SPACE_LOG2 = 1,
  DELTA_ATTENTION_C_GATE_SPACE_LINEAR = 2,
  DELTA_ATTENTION_C_GATE_SPACE_SOFTPLUS = 3,
  DELTA_ATTENTION_C_GATE_SPACE_LOWER_BOUND = 4
};
enum {
  DELTA_ATTENTION_C_BETA_SPACE_VALUE = 0,
  DELTA_ATTENTION_C_BETA_SPACE_SIGMOID = 1,
  DELTA_ATTENTION_C_BETA_SPACE_TWICE_SIGMOID = 2
};

#define DELTA_ATTENTION_C_MAX_RANK 4

/* Strided views. Strides count elements; rank 0 (all zeros) means "none". */
typedef struct delta_attention_c_const_tensor {
  const void* data;
  int32_t dtype;
  int32_t device_type;
  int32_t device_index;
  int32_t rank;
  int64_t shape[DELTA_ATTENTION_C_MAX_RANK];
  int64_t strides[DELTA_ATTENTION_C_MAX_RANK];
} delta_attention_c_const_tensor;

typedef struct delta_attention_c_tensor {
  void* data;
  int32_t dtype;
  int32_t device_type;
  int32_t device_index;
  int32_t rank;
  int64_t shape[DELTA_ATTENTION_C_MAX_RANK];
  int64_t strides[DELTA_ATTENTION_C_MAX_RANK];
} delta_attention_c_tensor;

typedef struct delta_attention_c_recurrence {
  int32_t update;
  int32_t gate;
  int32_t normalize;
} delta_attention_c_recurrence;

typedef struct delta_attention_c_args {
  size_t struct_size;

  delta_attention_c_const_tensor q, k;               /* [B,T,H,K] */
  delta_attention_c_const_tensor v;                  /* [B,T,HV,V] */
  delta_attention_c_const_tensor log_decay;          /* none | [B,T,HV] | [B,T,HV,K] */
  delta_attention_c_const_tensor beta;               /* none | [B,T,HV] */
  delta_attention_c_const_tensor initial_state;      /* none | [N,HV,K,V] */
  delta_attention_c_const_tensor initial_normalizer; /* none | [N,HV,K] */
  delta_attention_c_const_tensor cu_seqlens;         /* none | [N+1], i32 or i64 */
  delta_attention_c_const_tensor a_log;              /* none | [HV] */
  delta_attention_c_const_tensor dt_bias;            /* none | [HV] | [HV,K] */

  delta_attention_c_tensor out;              /* [B,T,HV,V] */
  delta_attention_c_tensor final_state;      /* none | [N,HV,K,V] */
  delta_attention_c_tensor final_normalizer; /* none | [N,HV,K] */

  delta_attention_c_recurrence recurrence;
  int32_t has_scale; /* 0: scale is K^-0.5 */
  float scale;
  int32_t qk_l2norm;
  int32_t beta_space;
  int32_t gate_space;
  float gate_lower_bound;
  int32_t reserved; /* 0 */

  delta_attention_c_tensor intermediate_states; /* none | [B floor(T / state_interval),HV,K,V] */
  int64_t state_interval;                       /* 0 without them */
} delta_attention_c_args;

typedef struct delta_attention_c_execution {
  size_t struct_size;
  void* stream;    /* a cudaStream_t */
  void* workspace; /* delta_attention_c_workspace() bytes, or NULL */
  size_t workspace_bytes;
  const char* kernel; /* a kernel's name; NULL or "automatic" lets dispatch choose */
  int32_t deterministic;
  int32_t threads; /* CPU; 0 means all cores */
  int32_t check_values;
  int32_t reserved;     /* 0 */
  const char* settings; /* "name=int,name=int" for the kernel asked for by name; NULL or "": none */
} delta_attention_c_execution;

/* Texts that belong to the library and to the calling thread, good until its next call of delta_attention_c_dispatch_info. */
typedef struct delta_attention_c_dispatch {
  size_t struct_size;
  const char* kernel;   /* the kernel that would run; "" if none can */
  const char* reason;   /* why this one */
  const char* kernels;  /* every kernel of this build, one a line: "name: ok" or "name: why not" */
  const char* settings; /* what the caller or the tuned table chose for it, "name=int,name=int" */
} delta_attention_c_dispatch;

/* Defaults: no operands, linear(), scale K^-0.5. struct_size is the caller's sizeof. */
DELTA_ATTENTION_API void delta_attention_c_args_init(delta_attention_c_args* args, size_t struct_size);
DELTA_ATTENTION_API void delta_attention_c_execution_init(delta_attention_c_execution* execution, size_t struct_size);
DELTA_ATTENTION_API void delta_attention_c_dispatch_init(delta_attention_c_dispatch* dispatch, size_t struct_size);

/* Contiguous (row-major) views of CPU memory. Set device_type, device_index and strides afterwards where they differ. */
DELTA_ATTENTION_API delta_attention_c_const_tensor delta_attention_c_input(const void* data, int32_t dtype,
                                                                           int32_t rank, const int64_t* shape);
DELTA_ATTENTION_API delta_attention_c_tensor delta_attention_c_output(void* data, int32_t dtype, int32_t rank,
                                                                      const int64_t* shape);

/* A preset of recurrence.h by name: "linear", "gla", "delta_net", "kda", ... An unknown name gives update = -1, which every
 * call refuses. */
DELTA_ATTENTION_API delta_attention_c_recurrence delta_attention_c_recurrence_named(const char* name);

/* Runs the recurrence; delta_attention_forward in C. execution may be NULL: the defaults. */
DELTA_ATTENTION_API delta_attention_c_status delta_attention_c_forward(const delta_attention_c_args* args,
                                                                       const delta_attention_c_execution* execution);

/* Bytes of workspace that delta_attention_c_forward needs for these arguments. */
DELTA_ATTENTION_API delta_attention_c_status delta_attention_c_workspace(const delta_attention_c_args* args,
                                                                         const delta_attention_c_execution* execution,
                                                                         size_t* bytes);

/* Which kernel would run and why the others would not. */
DELTA_ATTENTION_API delta_attention_c_status
delta_attention_c_dispatch_info(const delta_attention_c_args* args, const delta_attention_c_execution* execution,
                                delta_attention_c_dispatch* dispatch);

/* The message of the calling thread's last failed call, good until its next failed call; "" if none has failed. */
DELTA_ATTENTION_API const char* delta_attention_c_last_error(void);

/* "INVALID_ARGUMENT" and so on. */
DELTA_ATTENTION_API const char* delta_attention_c_status_name(delta_attention_c_status status);

/* The version of the library that runs: DELTA_ATTENTION_VERSION of its build. */
DELTA_ATTENTION_API const char* delta_attention_c_version(void);

#ifdef __cplusplus
}
#endif
