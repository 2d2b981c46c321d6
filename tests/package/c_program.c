/* The C interface from C99: results small enough to compute by hand, and every kind of refusal. Exits with 0 if all is well. */

#define _POSIX_C_SOURCE 200112L /* setenv */

#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "delta_attention/c_api.h"

static int failures = 0;

#define CHECK(condition)                                                                                      \
  do {                                                                                                        \
    if (!(condition)) {                                                                                       \
      ++failures;                                                                                             \
      printf("line %d: %s is false; last error: %s\n", __LINE__, #condition, delta_attention_c_last_error()); \
    }                                                                                                         \
  } while (0)

static int message_has(const char* text) { return strstr(delta_attention_c_last_error(), text) != NULL; }

/* Two tokens of DeltaNet, one head, K = V = 2. Every number is exact in f32. */
typedef struct {
  float q[4], k[4], v[4], beta[2], out[4], state[4];
  delta_attention_c_args args;
} Example;

static void make_example(Example* x) {
  const int64_t shape[4] = {1, 2, 1, 2}, beta_shape[3] = {1, 2, 1}, state_shape[4] = {1, 1, 2, 2};
  const float q[4] = {1, 1, 2, 0}, k[4] = {1, 0, 1, 0}, v[4] = {1, 2, 3, 4}, beta[2] = {0.5f, 0.5f};
  int i;
  memcpy(x->q, q, sizeof q);
  memcpy(x->k, k, sizeof k);
  memcpy(x->v, v, sizeof v);
  memcpy(x->beta, beta, sizeof beta);
  for (i = 0; i < 4; ++i) x->out[i] = x->state[i] = -7.0f;
  delta_attention_c_args_init(&x->args, sizeof x->args);
  x->args.q = delta_attention_c_input(x->q, DELTA_ATTENTION_C_F32, 4, shape);
  x->args.k = delta_attention_c_input(x->k, DELTA_ATTENTION_C_F32, 4, shape);
  x->args.v = delta_attention_c_input(x->v, DELTA_ATTENTION_C_F32, 4, shape);
  x->args.beta = delta_attention_c_input(x->beta, DELTA_ATTENTION_C_F32, 3, beta_shape);
  x->args.out = delta_attention_c_output(x->out, DELTA_ATTENTION_C_F32, 4, shape);
  x->args.final_state = delta_attention_c_output(x->state, DELTA_ATTENTION_C_F32, 4, state_shape);
  x->args.recurrence = delta_attention_c_recurrence_named("delta_net");
  x->args.has_scale = 1;
  x->args.scale = 1.0f;
}

static int untouched(const Example* x) {
  int i, same = 1;
  for (i = 0; i < 4; ++i) same = same && x->out[i] == -7.0f && x->state[i] == -7.0f;
  return same;
}

/* t = 0: S = (0.5, 1; 0, 0), o = (0.5, 1).   t = 1: u = 0.5 ((3,4) - (0.5,1)), S = (1.75, 2.5; 0, 0), o = (3.5, 5). */
static void computes_delta_net(void) {
  const float out[4] = {0.5f, 1, 3.5f, 5}, state[4] = {1.75f, 2.5f, 0, 0};
  Example x;
  int i;
  make_example(&x);
  CHECK(delta_attention_c_forward(&x.args, NULL) == DELTA_ATTENTION_C_OK);
  for (i = 0; i < 4; ++i) CHECK(fabsf(x.out[i] - out[i]) <= 1e-6f && fabsf(x.state[i] - state[i]) <= 1e-6f);
}

/* Gated DeltaNet, one token from a given state: decay 1/2 halves S0 = (2,4; 6,8), then row 1 moves half way to v = (10,20). */
static void continues_from_a_state(void) {
  const int64_t shape[4] = {1, 1, 1, 2}, token_shape[3] = {1, 1, 1}, state_shape[4] = {1, 1, 2, 2};
  const float q[2] = {1, 2}, k[2] = {0, 1}, v[2] = {10, 20}, half = 0.5f, initial[4] = {2, 4, 6, 8};
  const float expected_out[2] = {7, 13}, expected_state[4] = {1, 2, 6.5f, 12};
  float out[2], state[4];
  delta_attention_c_args args;
  int i;
  delta_attention_c_args_init(&args, sizeof args);
  args.q = delta_attention_c_input(q, DELTA_ATTENTION_C_F32, 4, shape);
  args.k = delta_attention_c_input(k, DELTA_ATTENTION_C_F32, 4, shape);
  args.v = delta_attention_c_input(v, DELTA_ATTENTION_C_F32, 4, shape);
  args.beta = delta_attention_c_input(&half, DELTA_ATTENTION_C_F32, 3, token_shape);
  args.log_decay = delta_attention_c_input(&half, DELTA_ATTENTION_C_F32, 3, token_shape);
  args.gate_space = DELTA_ATTENTION_C_GATE_SPACE_LINEAR;
  args.initial_state = delta_attention_c_input(initial, DELTA_ATTENTION_C_F32, 4, state_shape);
  args.out = delta_attention_c_output(out, DELTA_ATTENTION_C_F32, 4, shape);
  args.final_state = delta_attention_c_output(state, DELTA_ATTENTION_C_F32, 4, state_shape);
  args.recurrence = delta_attention_c_recurrence_named("gated_delta_net");
  args.has_scale = 1;
  args.scale = 0.5f;
  CHECK(delta_attention_c_forward(&args, NULL) == DELTA_ATTENTION_C_OK);
  for (i = 0; i < 2; ++i) CHECK(fabsf(out[i] - expected_out[i]) <= 1e-5f);
  for (i = 0; i < 4; ++i) CHECK(fabsf(state[i] - expected_state[i]) <= 1e-5f);
}

/* The example's state after each of its two tokens. A caller built before the fields existed is not asked about them. */
static void keeps_states_on_the_way(void) {
  const int64_t shape[4] = {2, 1, 2, 2};
  const float expected[8] = {0.5f, 1, 0, 0, 1.75f, 2.5f, 0, 0};
  float states[8] = {0};
  Example x;
  int i;
  make_example(&x);
  x.args.intermediate_states = delta_attention_c_output(states, DELTA_ATTENTION_C_F32, 4, shape);
  x.args.state_interval = 1;
  CHECK(delta_attention_c_forward(&x.args, NULL) == DELTA_ATTENTION_C_OK);
  for (i = 0; i < 8; ++i) CHECK(fabsf(states[i] - expected[i]) <= 1e-6f);
  make_example(&x);
  x.args.state_interval = 1;
  CHECK(delta_attention_c_forward(&x.args, NULL) == DELTA_ATTENTION_C_INVALID_ARGUMENT);
  CHECK(message_has("state_interval") && untouched(&x));
  x.args.struct_size = offsetof(delta_attention_c_args, intermediate_states);
  CHECK(delta_attention_c_forward(&x.args, NULL) == DELTA_ATTENTION_C_OK && x.out[3] == 5.0f);
}

static void obeys_execution(void) {
  delta_attention_c_execution execution;
  Example x;
  size_t bytes = (size_t)-1;
  delta_attention_c_execution_init(&execution, sizeof execution);
  execution.kernel = "reference";
  execution.threads = 1;
  execution.check_values = 1;
  make_example(&x);
  CHECK(delta_attention_c_workspace(&x.args, &execution, &bytes) == DELTA_ATTENTION_C_OK && bytes == 0);
  CHECK(delta_attention_c_forward(&x.args, &execution) == DELTA_ATTENTION_C_OK && x.out[3] == 5.0f);
  execution.kernel = "no_such_kernel";
  make_example(&x);
  CHECK(delta_attention_c_forward(&x.args, &execution) == DELTA_ATTENTION_C_UNSUPPORTED);
  CHECK(message_has("no_such_kernel") && message_has("reference") && untouched(&x));
  execution.reserved = 1;
  CHECK(delta_attention_c_forward(&x.args, &execution) == DELTA_ATTENTION_C_INVALID_ARGUMENT &&
        message_has("reserved"));
  execution.reserved = 0;
  execution.kernel = "reference";
  execution.settings = "no_such_setting=1";
  CHECK(delta_attention_c_forward(&x.args, &execution) == DELTA_ATTENTION_C_INVALID_ARGUMENT);
  CHECK(message_has("settings") && message_has("no_such_setting") && untouched(&x));
  execution.settings = "";
  CHECK(delta_attention_c_forward(&x.args, &execution) == DELTA_ATTENTION_C_OK);
}

static void explains_dispatch(void) {
  delta_attention_c_dispatch dispatch;
  Example x;
  make_example(&x);
  delta_attention_c_dispatch_init(&dispatch, sizeof dispatch);
  CHECK(delta_attention_c_dispatch_info(&x.args, NULL, &dispatch) == DELTA_ATTENTION_C_OK);
  CHECK(dispatch.kernel != NULL && strlen(dispatch.kernel) > 0);
  CHECK(dispatch.reason != NULL && strlen(dispatch.reason) > 0);
  CHECK(dispatch.kernels != NULL && strstr(dispatch.kernels, "reference: ok\n") != NULL);
  CHECK(dispatch.settings != NULL);
  CHECK(untouched(&x));
  dispatch.settings = NULL;
  dispatch.struct_size = offsetof(delta_attention_c_dispatch, settings); /* a caller built before it existed */
  CHECK(delta_attention_c_dispatch_info(&x.args, NULL, &dispatch) == DELTA_ATTENTION_C_OK);
  CHECK(dispatch.settings == NULL && dispatch.kernel != NULL);
  dispatch.struct_size = 1;
  CHECK(delta_attention_c_dispatch_info(&x.args, NULL, &dispatch) == DELTA_ATTENTION_C_INVALID_ARGUMENT);
}

/* Refused, with a message that has `word`, and nothing written. */
static void refuses(Example* x, const char* word) {
  CHECK(delta_attention_c_forward(&x->args, NULL) == DELTA_ATTENTION_C_INVALID_ARGUMENT);
  CHECK(message_has(word) && untouched(x));
}

static void refuses_bad_input(void) {
  Example x;
  delta_attention_c_args empty;
  CHECK(delta_attention_c_forward(NULL, NULL) == DELTA_ATTENTION_C_INVALID_ARGUMENT);
  delta_attention_c_args_init(&empty, sizeof empty);
  CHECK(delta_attention_c_forward(&empty, NULL) == DELTA_ATTENTION_C_INVALID_ARGUMENT && message_has("q: expected"));
  make_example(&x);
  CHECK(delta_attention_c_workspace(&x.args, NULL, NULL) == DELTA_ATTENTION_C_INVALID_ARGUMENT);
  x.args.struct_size = 0;
  refuses(&x, "struct_size");
  make_example(&x);
  x.args.k.shape[3] = 3;
  refuses(&x, "k: expected shape");
  make_example(&x);
  x.args.q.rank = 400;
  refuses(&x, "q: expected a rank");
  make_example(&x);
  x.args.v.dtype = 99;
  refuses(&x, "v: expected");
  make_example(&x);
  x.args.q.device_type = 99;
  refuses(&x, "q: expected device_type");
  make_example(&x);
  x.args.out.data = NULL;
  refuses(&x, "out: expected");
  make_example(&x);
  x.args.reserved = 1;
  refuses(&x, "reserved");
  make_example(&x);
  x.args.scale = (float)NAN;
  refuses(&x, "scale");
  make_example(&x);
  x.args.recurrence = delta_attention_c_recurrence_named("no such preset");
  refuses(&x, "recurrence.update");
  make_example(&x);
  x.args.recurrence = delta_attention_c_recurrence_named(NULL);
  refuses(&x, "recurrence.update");
}

/* A program built against a later header passes a larger struct: fine while the new fields are unset, refused otherwise. */
static void accepts_later_structs(void) {
  struct {
    delta_attention_c_args args;
    int64_t later_field;
  } later;
  Example x;
  make_example(&x);
  delta_attention_c_args_init(&later.args, sizeof later);
  CHECK(later.later_field == 0);
  later.args = x.args;
  later.args.struct_size = sizeof later;
  CHECK(delta_attention_c_forward(&later.args, NULL) == DELTA_ATTENTION_C_OK && x.out[3] == 5.0f);
  later.later_field = 1;
  CHECK(delta_attention_c_forward(&later.args, NULL) == DELTA_ATTENTION_C_INVALID_ARGUMENT &&
        message_has("newer field"));
}

/* CUDA tensors where no CUDA device can be seen. main() hides the devices, so this holds on every machine. */
static void reports_a_missing_device(void) {
  Example x;
  make_example(&x);
  x.args.q.device_type = x.args.k.device_type = x.args.v.device_type = x.args.beta.device_type = DELTA_ATTENTION_C_CUDA;
  x.args.out.device_type = x.args.final_state.device_type = DELTA_ATTENTION_C_CUDA;
  CHECK(delta_attention_c_forward(&x.args, NULL) == DELTA_ATTENTION_C_NO_DEVICE);
  CHECK(strlen(delta_attention_c_last_error()) > 0 && untouched(&x));
}

int main(void) {
  setenv("CUDA_VISIBLE_DEVICES", "", 1);
  CHECK(strcmp(delta_attention_c_last_error(), "") == 0);
  CHECK(strcmp(delta_attention_c_version(), DELTA_ATTENTION_VERSION) == 0);
  CHECK(strcmp(delta_attention_c_status_name(DELTA_ATTENTION_C_NO_DEVICE), "NO_DEVICE") == 0);
  computes_delta_net();
  continues_from_a_state();
  keeps_states_on_the_way();
  obeys_execution();
  explains_dispatch();
  refuses_bad_input();
  accepts_later_structs();
  reports_a_missing_device();
  computes_delta_net(); /* a failed call leaves nothing behind */
  printf("%s\n", failures == 0 ? "C interface: all checks passed" : "C interface: some checks failed");
  return failures == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
