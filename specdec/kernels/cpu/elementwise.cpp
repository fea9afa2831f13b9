#include "elementwise.h"

#include <algorithm>
#include <cmath>

#include "lanes.h"

namespace specdec {

namespace {

// Calls work(begin, count) for `size` numbers, a vector at a time.
template <typename Work>
SPECDEC_INLINE void by_lanes(int64_t size, Work&& work) {
  int64_t begin = 0;
  for (; begin + kLanes <= size; begin += kLanes) work(begin, int64_t(kLanes));
  if (begin < size) work(begin, size - begin);
}

}  // namespace

void rms_norm(const float* x, const float* weight, float eps, int64_t size, float* to) {
  Floats squares = {};
  by_lanes(size, [&](int64_t begin, int64_t count) {
    const Floats part = load_part(x + begin, count);
    squares += part * part;
  });
  const float scale = 1.0f / std::sqrt(sum_of(squares) / float(size) + eps);
  by_lanes(size, [&](int64_t begin, int64_t count) {
    const Floats scaled = load_part(x + begin, count) * scale;
    store_part(to + begin, scaled * load_part(weight + begin, count), count);
  });
}

void rotate(float* head, const float* cos, const float* sin, int64_t head_dim) {
  const int64_t half = head_dim / 2;
  by_lanes(half, [&](int64_t begin, int64_t count) {
    const Floats first = load_part(head + begin, count);
    const Floats second = load_part(head + half + begin, count);
    const Floats c = load_part(cos + begin, count), s = load_part(sin + begin, count);
    store_part(head + begin, first * c - second * s, count);
    store_part(head + half + begin, second * c + first * s, count);
  });
}

void gate_units(float* gate, const float* up, int64_t size) {
  by_lanes(size, [&](int64_t begin, int64_t count) {
    const Floats x = load_part(gate + begin, count);
    const Floats activated = x / (1.0f + exp_of(-x));
    store_part(gate + begin, activated * load_part(up + begin, count), count);
  });
}

}  // namespace specdec
