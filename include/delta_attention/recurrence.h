#pragma once

// The family of recurrences, and the published members of it by name.
//
// One state S [K,V] per (sequence, value head), optionally a normaliser z [K]. Token by token:
//
//     decay      S <- Diag(a_t) S                    a_t = exp(log_decay_t), one number or one per channel of K
//     delta      u_t = beta_t (v_t - S^T k_t)        (additive: u_t = beta_t v_t)
//     accumulate S <- S + k_t u_t^T
//     read       o_t = scale * S^T q_t               (normalised: divided by z^T q_t, z <- Diag(a_t) z + k_t)

#include <cstdint>

namespace delta_attention {

enum class Update : std::int32_t {
  additive,  // u = beta v
  delta,     // u = beta (v - S^T k): the error-correcting update
};

enum class Gate : std::int32_t {
  none,     // a = 1
  scalar,   // one decay per (token, value head)
  channel,  // one decay per (token, value head, channel of K)
};

struct Recurrence {
  Update update = Update::additive;
  Gate gate = Gate::none;
  bool normalize = false;
};

constexpr bool operator==(Recurrence a, Recurrence b) {
  return a.update == b.update && a.gate == b.gate && a.normalize == b.normalize;
}

/// S += k v^T, o = S^T q. Linear attention: Katharopoulos et al., "Transformers are RNNs", 2020 (arXiv:2006.16236).
/// `normalized_linear` divides by z^T q as that paper does; it wants positive features, or z^T q can be 0.
constexpr Recurrence linear() { return {Update::additive, Gate::none, false}; }
constexpr Recurrence normalized_linear() { return {Update::additive, Gate::none, true}; }

/// S = gamma_h S + k v^T, gamma a constant per head. RetNet: Sun et al., 2023 (arXiv:2307.08621).
/// Pass log gamma as log_decay [B,T,HV] with strides (0, 0, 1): HV numbers serve every token.
constexpr Recurrence retention() { return {Update::additive, Gate::scalar, false}; }

/// The same recurrence with the decays of Lightning Attention: Qin et al., 2024 (arXiv:2401.04658). log_decay = -slope_h.
constexpr Recurrence lightning() { return {Update::additive, Gate::scalar, false}; }

/// S = Diag(a_t) S + k v^T, one data-dependent decay per channel. GLA: Yang et al., 2023 (arXiv:2312.06635).
constexpr Recurrence gla() { return {Update::additive, Gate::channel, false}; }

/// h = exp(dt A) h + dt B x^T, y = h^T C. The SSD core of Mamba-2: Dao and Gu, 2024 (arXiv:2405.21060).
/// q = C, k = B, v = x, log_decay = dt A, beta = dt, scale = 1; the skip D x is the caller's.
constexpr Recurrence mamba2() { return {Update::additive, Gate::scalar, false}; }

/// S = (I - beta k k^T) S + beta k v^T. DeltaNet: Yang et al., 2024 (arXiv:2406.06484); keys of unit length.
constexpr Recurrence delta_net() { return {Update::delta, Gate::none, false}; }

/// S = a_t (I - beta k k^T) S + beta k v^T. Gated DeltaNet (Qwen3-Next): Yang et al., 2024 (arXiv:2412.06464).
constexpr Recurrence gated_delta_net() { return {Update::delta, Gate::scalar, false}; }

/// S = (I - beta k k^T) Diag(a_t) S + beta k v^T. Kimi Delta Attention: Kimi Team, 2025 (arXiv:2510.26692).
constexpr Recurrence kda() { return {Update::delta, Gate::channel, false}; }

/// The presets by name, for command lines and tables.
struct Preset {
  const char* name;
  Recurrence recurrence;
  const char* formula;
};

inline constexpr Preset kPresets[] = {
    {"linear", linear(), "S = S + k v^T"},
    {"normalized_linear", normalized_linear(), "S = S + k v^T; o / (z^T q)"},
    {"retention", retention(), "S = gamma S + k v^T"},
    {"lightning", lightning(), "S = exp(-slope) S + k v^T"},
    {"gla", gla(), "S = Diag(a) S + k v^T"},
    {"mamba2", mamba2(), "S = exp(dt A) S + k (dt v)^T"},
    {"delta_net", delta_net(), "S = (I - beta k k^T) S + beta k v^T"},
    {"gated_delta_net", gated_delta_net(), "S = a (I - beta k k^T) S + beta k v^T"},
    {"kda", kda(), "S = (I - beta k k^T) Diag(a) S + beta k v^T"},
};

}  // namespace delta_attention
