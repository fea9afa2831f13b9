#include "elementwise.h"

#include <algorithm>
#include <cmath>

#include "simd_math.h"

namespace specdec {

namespace {

// Call work(begin, count) for each vector of `size` floats; the last one may be partial.
template <typename Work>
SPECDEC_INLINE void for_each_vector(int64_t size, Work&& work) {
  int64_t begin = 0;
  for (; begin + kLanes <= size; begin += kLanes) work(begin, int64_t(kLanes));
  if (begin < size) work(begin, size - begin);
}

SPECDEC_INLINE Floats sigmoid(Floats x) { return 1.0f / (1.0f + vec_exp(-x)); }

SPECDEC_INLINE Floats vec_tanh(Floats x) { return 2.0f * sigmoid(2.0f * x) - 1.0f; }

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

void apply_rotary(float* head, const float* cos, const float* sin, int64_t head_dim) {
  const int64_t half = head_dim / 2;
  for_each_vector(half, [&](int64_t begin, int64_t count) {
    const Floats first = load_partial(head + begin, count);
    const Floats second = load_partial(head + half + begin, count);
    const Floats c = load_partial(cos + begin, count), s = load_partial(sin + begin, count);
    store_partial(head + begin, first * c - second * s, count);
    store_partial(head + half + begin, second * c + first * s, count);
  });
}

void silu_and_mul(float* gate, const float* up, int64_t size) {
  for_each_vector(size, [&](int64_t begin, int64_t count) {
    const Floats x = load_partial(gate + begin, count);
    const Floats activated = x / (1.0f + vec_exp(-x));
    store_partial(gate + begin, activated * load_partial(up + begin, count), count);
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
