// Causal convolution of a few rows, with vector operations.
#include "recurrence/convolution.h"

#include "base/elementwise.h"
#include "base/simd_math.h"

namespace specdec {
namespace {

// Weights of some channels: taps[place * stride + channel], and biases, which may be null.
struct Taps {
  const float* begin;
  int64_t size, stride;
  const float* bias;
};

// Write the sums of products of `count` channels, at most kLanes, in the order of the inputs.
SPECDEC_INLINE void convolve_vector(const Taps& taps, const float* const* x, int64_t channel,
                                    int64_t count, float* to) {
  Floats sum = {};
  for (int64_t place = 0; place < taps.size; ++place) {
    const float* const weights = taps.begin + place * taps.stride + channel;
    sum += load_partial(x[place] + channel, count) * load_partial(weights, count);
  }
  if (taps.bias) sum += load_partial(taps.bias + channel, count);
  store_partial(to + channel, sum, count);
}

// x: the inputs of each place; to: may be the last of them.
void convolve_row(const Taps& taps, const float* const* x, int64_t num_channels, float* to) {
  int64_t channel = 0;
  for (; channel + kLanes <= num_channels; channel += kLanes) {
    convolve_vector(taps, x, channel, kLanes, to);
  }
  if (channel < num_channels) convolve_vector(taps, x, channel, num_channels - channel, to);
}

}  // namespace

void convolve(const RecurrentShape& shape, const RecurrentWeights& weights, const InputRows& rows,
              int64_t begin, int64_t end, const TreeOrder& tree, Range channels,
              int64_t first_column) {
  const int64_t column = first_column + channels.begin, count = channels.end - channels.begin;
  const float* const bias = weights.convolution_bias;
  const Taps taps = {weights.taps + channels.begin, shape.kernel_size, shape.num_channels,
                     bias ? bias + channels.begin : nullptr};
  const float* x[kMaxTaps];
  for (int64_t index = end - 1; index >= begin; --index) {  // an output overwrites its input
    int64_t row = index - shape.window();
    for (int64_t place = shape.window(); place >= 0; --place, row = tree.before(row)) {
      x[place] = rows.row(shape.window() + row) + column;
    }
    float* const to = rows.row(index) + column;
    convolve_row(taps, x, count, to);
    if (shape.num_heads) silu(to, count);
  }
}

}  // namespace specdec
