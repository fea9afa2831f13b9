// Norms, activation functions and rotary embedding of one row, with vector operations.
#include "base/elementwise.h"

#include <algorithm>
#include <cmath>

#include "base/simd_math.h"

namespace specdec {

namespace {

// Call work(begin, count) for each vector of `size` floats; the last one may be partial.
template <typename Work>
SPECDEC_INLINE void for_each_vector(int64_t size, Work&& work) {
  int64_t begin = 0;
  for (; begin + kLanes <= size; begin += kLanes) work(begin, int64_t(kLanes));
  if (begin < size) work(begin, size - begin);
}

SPECDEC_INLINE Floats silu_of(Floats x) { return x / (1.0f + vec_exp(-x)); }

// 0.5 x (1 + tanh(u)) = x sigmoid(2 u) with u = sqrt(2 / pi) (x + 0.044715 x^3).
SPECDEC_INLINE Floats gelu_of(Floats x) {
  return x * sigmoid(1.5957691216057308f * (x + 0.044715f * (x * x * x)));
}

SPECDEC_INLINE Floats relu2_of(Floats x) {
  const Floats positive = x < Floats{} ? Floats{} : x;  // NaN stays
  return positive * positive;
}

// x = function(x) over `size` numbers.
template <typename Function>
SPECDEC_INLINE void transform(float* x, int64_t size, Function&& function) {
  for_each_vector(size, [&](int64_t begin, int64_t count) {
    store_partial(x + begin, function(load_partial(x + begin, count)), count);
  });
}

// gate = function(gate) * up over `size` numbers.
template <typename Function>
SPECDEC_INLINE void transform_and_mul(float* gate, const float* up, int64_t size,
                                      Function&& function) {
  for_each_vector(size, [&](int64_t begin, int64_t count) {
    const Floats activated = function(load_partial(gate + begin, count));
    store_partial(gate + begin, activated * load_partial(up + begin, count), count);
  });
}

}  // namespace

void rms_norm(const float* x, const float* weight, float eps, int64_t size, float* to) {
  Floats squares = {};
  for_each_vector(size, [&](int64_t begin, int64_t count) {
    const Floats part = load_partial(x + begin, count);
    squares += part * part;
  });
  const float scale = 1.0f / std::sqrt(reduce_sum(squares) / float(size) + eps);
  for_each_vector(size, [&](int64_t begin, int64_t count) {
    const Floats scaled = load_partial(x + begin, count) * scale;
    store_partial(to + begin, scaled * load_partial(weight + begin, count), count);
  });
}

void layer_norm(const float* x, const float* weight, const float* bias, float eps, int64_t size,
                float* to) {
  Floats sum = {};
  for_each_vector(size, [&](int64_t begin, int64_t count) {
    sum += load_partial(x + begin, count);
  });
  const float mean = reduce_sum(sum) / float(size);
  for_each_vector(size, [&](int64_t begin, int64_t count) {
    store_partial(to + begin, load_partial(x + begin, count) - mean, count);
  });
  const float factor = 1.0f / std::sqrt(sum_squares(to, size) / float(size) + eps);
  for_each_vector(size, [&](int64_t begin, int64_t count) {
    const Floats weights = load_partial(weight + begin, count) * factor;
    const Floats offset = bias ? load_partial(bias + begin, count) : Floats{};
    store_partial(to + begin, load_partial(to + begin, count) * weights + offset, count);
  });
}

float sum_squares(const float* x, int64_t size) {
  Floats squares = {};
  for_each_vector(size, [&](int64_t begin, int64_t count) {
    const Floats part = load_partial(x + begin, count);
    squares += part * part;
  });
  return reduce_sum(squares);
}

void scale(float* x, float factor, int64_t size) {
  transform(x, size, [&](Floats part) { return part * factor; });
}

void scale_by_weight(float* x, float factor, const float* weight, int64_t size) {
  transform_and_mul(x, weight, size, [&](Floats part) { return part * factor; });
}

void add_scaled(const float* x, float factor, int64_t size, float* to) {
  for_each_vector(size, [&](int64_t begin, int64_t count) {
    const Floats added = load_partial(x + begin, count) * factor;
    store_partial(to + begin, load_partial(to + begin, count) + added, count);
  });
}

void apply_rotary(float* head, const float* cos, const float* sin, int64_t rotary_dim) {
  const int64_t half = rotary_dim / 2;
  for_each_vector(half, [&](int64_t begin, int64_t count) {
    const Floats first = load_partial(head + begin, count);
    const Floats second = load_partial(head + half + begin, count);
    const Floats c = load_partial(cos + begin, count), s = load_partial(sin + begin, count);
    store_partial(head + begin, first * c - second * s, count);
    store_partial(head + half + begin, second * c + first * s, count);
  });
}

void silu_and_mul(float* gate, const float* up, int64_t size) {
  transform_and_mul(gate, up, size, silu_of);
}

void gelu_and_mul(float* gate, const float* up, int64_t size) {
  transform_and_mul(gate, up, size, gelu_of);
}

void clamped_swiglu(float* gate, const float* up, int64_t size) {
  const Floats highest = broadcast(7.0f), lowest = -highest;
  for_each_vector(size, [&](int64_t begin, int64_t count) {
    Floats g = load_partial(gate + begin, count), u = load_partial(up + begin, count);
    g = g > highest ? highest : g;  // NaN stays
    u = u > highest ? highest : (u < lowest ? lowest : u);
    store_partial(gate + begin, (u + 1.0f) * g * sigmoid(1.702f * g), count);
  });
}

void silu(float* x, int64_t size) { transform(x, size, silu_of); }

void gelu(float* x, int64_t size) { transform(x, size, gelu_of); }

void relu2(float* x, int64_t size) { transform(x, size, relu2_of); }

void relu2_and_mul(float* gate, const float* up, int64_t size) {
  transform_and_mul(gate, up, size, relu2_of);
}

void xielu(float* x, const float* parameters, int64_t size) {
  const float alpha_p = parameters[0], alpha_n = parameters[1], beta = parameters[2];
  const Floats eps = broadcast(parameters[3]), zero = Floats{};
  transform(x, size, [&](Floats part) {
    const Floats below = part > eps ? eps : part;  // NaN stays
    const Floats negative = (vec_exp(below) - 1.0f - part) * alpha_n;
    const Floats positive = part * part * alpha_p;
    return (part > zero ? positive : negative) + part * beta;
  });
}

void add_silu(const float* x, int64_t size, float* to) {
  for_each_vector(size, [&](int64_t begin, int64_t count) {
    const Floats part = load_partial(x + begin, count);
    const Floats activated = part / (1.0f + vec_exp(-part));
    store_partial(to + begin, load_partial(to + begin, count) + activated, count);
  });
}

void multiply_by_sigmoid(const float* x, int64_t size, float* to) {
  for_each_vector(size, [&](int64_t begin, int64_t count) {
    const Floats gate = sigmoid(load_partial(x + begin, count));
    store_partial(to + begin, load_partial(to + begin, count) * gate, count);
  });
}

void multiply_by_silu(const float* x, int64_t size, float* to) {
  for_each_vector(size, [&](int64_t begin, int64_t count) {
    const Floats gate = silu_of(load_partial(x + begin, count));
    store_partial(to + begin, load_partial(to + begin, count) * gate, count);
  });
}

float dot(const float* x, const float* y, int64_t size) {
  Floats sum = {};
  for_each_vector(size, [&](int64_t begin, int64_t count) {
    sum += load_partial(x + begin, count) * load_partial(y + begin, count);
  });
  return reduce_sum(sum);
}

void tanh_of(const float* x, int64_t size, float* to) {
  for_each_vector(size, [&](int64_t begin, int64_t count) {
    store_partial(to + begin, vec_tanh(load_partial(x + begin, count)), count);
  });
}

void update_memory(const float* gate, const float* candidate, int64_t size, float* memory) {
  for_each_vector(size, [&](int64_t begin, int64_t count) {
    const Floats kept = sigmoid(load_partial(gate + begin, count));
    const Floats added = vec_tanh(load_partial(candidate + begin, count));
    const Floats old = load_partial(memory + begin, count);
    store_partial(memory + begin, kept * old + (1.0f - kept) * added, count);
  });
}

}  // namespace specdec
