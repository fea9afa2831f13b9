// Element-wise operations of a decoder, one row at a time; no result depends on other rows.
#pragma once

#include <cstdint>

namespace specdec {

// to = x / rms(x) * weight over `size` numbers (Zhang and Sennrich 2019); `to` may be x.
void rms_norm(const float* x, const float* weight, float eps, int64_t size, float* to);

// to = (x - mean(x)) / std(x) * weight + bias over `size` numbers (Ba et al. 2016); `to` may be x,
// and bias null.
void layer_norm(const float* x, const float* weight, const float* bias, float eps, int64_t size,
                float* to);

// Return the sum of squares of `size` numbers.
float sum_squares(const float* x, int64_t size);

// x *= factor over `size` numbers.
void scale(float* x, float factor, int64_t size);

// x = x * factor * weight over `size` numbers.
void scale_by_weight(float* x, float factor, const float* weight, int64_t size);

// to += factor * x over `size` numbers.
void add_scaled(const float* x, float factor, int64_t size, float* to);

// Apply rotary position embedding (Su et al. 2021) to the first rotary_dim numbers of a head in
// place, in the half-split layout of Hugging Face models. cos, sin: [rotary_dim / 2].
void apply_rotary(float* head, const float* cos, const float* sin, int64_t rotary_dim);

// gate = silu(gate) * up, the hidden units of SwiGLU (Shazeer 2020). gate, up: [size].
void silu_and_mul(float* gate, const float* up, int64_t size);

// gate = gelu(gate) * up, the hidden units of GEGLU, with GELU's tanh approximation.
void gelu_and_mul(float* gate, const float* up, int64_t size);

// gate = (up + 1) gate sigmoid(1.702 gate), with gate up to 7 and up from -7 to 7: the hidden units
// of GPT-OSS.
void clamped_swiglu(float* gate, const float* up, int64_t size);

// x = silu(x), x = gelu(x) with the tanh approximation, and x = max(x, 0)^2, over `size` numbers.
void silu(float* x, int64_t size);
void gelu(float* x, int64_t size);
void relu2(float* x, int64_t size);

// gate = max(gate, 0)^2 * up. gate, up: [size].
void relu2_and_mul(float* gate, const float* up, int64_t size);

// x = xIELU(x) over `size` numbers (Huang and Schlag, arXiv 2411.13010): alpha_p x^2 + beta x above
// 0, else alpha_n (e^min(x, eps) - 1 - x) + beta x. parameters: alpha_p, alpha_n, beta, eps.
void xielu(float* x, const float* parameters, int64_t size);

// to += silu(x) over `size` numbers.
void add_silu(const float* x, int64_t size, float* to);

// to *= sigmoid(x) over `size` numbers.
void multiply_by_sigmoid(const float* x, int64_t size, float* to);

// to *= silu(x) over `size` numbers.
void multiply_by_silu(const float* x, int64_t size, float* to);

// Return the sum of products of `size` numbers.
float dot(const float* x, const float* y, int64_t size);

// to = tanh(x) over `size` numbers.
void tanh_of(const float* x, int64_t size, float* to);

// memory = g * memory + (1 - g) * tanh(candidate) with g = sigmoid(gate), over `size` numbers.
void update_memory(const float* gate, const float* candidate, int64_t size, float* memory);

}  // namespace specdec
