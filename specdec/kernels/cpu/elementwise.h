// The small operations of a decoder, one row at a time: what a row comes to is its own affair.
#pragma once

#include <cstdint>

namespace specdec {

// to = x / rms(x) * weight over `size` numbers (Zhang and Sennrich 2019); `to` may be x.
void rms_norm(const float* x, const float* weight, float eps, int64_t size, float* to);

// Rotates a head in place by the angles of its position (Su et al. 2021), in the half-split layout
// of Hugging Face models. cos and sin: [head_dim / 2].
void apply_rotary(float* head, const float* cos, const float* sin, int64_t head_dim);

// gate = silu(gate) * up, the hidden units of SwiGLU (Shazeer 2020).
void silu_and_mul(float* gate, const float* up, int64_t size);

}  // namespace specdec
