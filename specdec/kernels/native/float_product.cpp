#include "float_product.h"

#ifdef __F16C__
#include <immintrin.h>
#endif

#include "tiles.h"

namespace specdec {
namespace {

// Inputs that are summed before the sum is added to the output. Their weights, those of the block
// that is fetched meanwhile, and those inputs of kBlockRows rows fit a second-level cache of 1 MiB.
// Part of the definition of a product: a block's sum is rounded as one number.
constexpr int64_t kBlockInputs = 1024;
constexpr int64_t kBlockRows = 72;

struct Float32 {
  using Element = float;
  static Floats load_weights(const float* weights) { return load<Floats>(weights); }
};

struct BFloat16 {
  using Element = uint16_t;
  static Floats load_weights(const uint16_t* weights) {
    return (Floats)(__builtin_convertvector(load<Halves>(weights), Bits) << 16);
  }
};

struct Float16 {
  using Element = uint16_t;
#if defined(__AVX512F__)
  static Floats load_weights(const uint16_t* weights) {
    return (Floats)_mm512_maskz_cvtph_ps(0xffff, load<__m256i>(weights));
  }
#elif defined(__F16C__)
  static Floats load_weights(const uint16_t* weights) {
    return (Floats)_mm256_cvtph_ps(load<__m128i>(weights));
  }
#else
  // Moves exponent and fraction into place, and multiplies by 2^112, the difference of the biases:
  // exact for all that is finite.
  static Floats load_weights(const uint16_t* weights) {
    const Bits bits = __builtin_convertvector(load<Halves>(weights), Bits);
    const Floats magnitude = (Floats)((bits & 0x7fff) << 13) * 0x1p112f;
    return (Floats)((Bits)magnitude | (bits & 0x8000) << 16);
  }
#endif
};

// One block of inputs of a few rows, and the panels that they are multiplied by.
template <class Element>
struct FloatTile {
  const Element* weights;
  int64_t panel_elements;  // from one panel to the next
  int64_t panel_outputs;
  int64_t inputs;  // in this block
  Ahead ahead;
  const float* x;
  int64_t x_stride;
  float* y;
  int64_t y_stride;
  int64_t outputs;    // from the first of the tile to the last of the matrix
  const float* bias;  // what sums begin with, or null
  bool adds;          // to what y holds
};

template <class Weights>
struct FloatKernels {
  using Tile = FloatTile<typename Weights::Element>;
  static constexpr int kMaxRows = kTileSums / kTileVectors;

  template <int kRows, int kPanels>
  static void run(const Tile& tile) {
    constexpr int kVectors = kPanels * kPanelVectors;
    Floats sums[kRows][kVectors];
    SPECDEC_UNROLL
    for (int vector = 0; vector < kVectors; ++vector) {
      const int64_t first = output_of(tile, vector);
      const Floats begin = tile.bias ? read(tile.bias + first, tile.outputs - first) : Floats{};
      SPECDEC_UNROLL
      for (int row = 0; row < kRows; ++row) sums[row][vector] = begin;
    }
    for (int64_t input = 0; input < tile.inputs; ++input) {
      Floats weights[kVectors];
      SPECDEC_UNROLL
      for (int vector = 0; vector < kVectors; ++vector) {
        const auto* panel = tile.weights + vector / kPanelVectors * tile.panel_elements;
        const auto* source = panel + input * kPanel + vector % kPanelVectors * kLanes;
        weights[vector] = Weights::load_weights(source);
      }
      SPECDEC_UNROLL
      for (int panel = 0; panel < kPanels; ++panel) {
        const int64_t before = panel * tile.panel_elements * sizeof(*tile.weights);
        __builtin_prefetch(tile.ahead.from + before + input * tile.ahead.step);
      }
      SPECDEC_UNROLL
      for (int row = 0; row < kRows; ++row) {
        const float value = tile.x[row * tile.x_stride + input];
        SPECDEC_UNROLL
        for (int vector = 0; vector < kVectors; ++vector) {
          sums[row][vector] += weights[vector] * value;
        }
      }
    }
    SPECDEC_UNROLL
    for (int row = 0; row < kRows; ++row) {
      SPECDEC_UNROLL
      for (int vector = 0; vector < kVectors; ++vector) finish(tile, row, vector, sums[row][vector]);
    }
  }

 private:
  static int64_t output_of(const Tile& tile, int vector) {
    return vector / kPanelVectors * tile.panel_outputs + vector % kPanelVectors * kLanes;
  }

  static void finish(const Tile& tile, int row, int vector, Floats sum) {
    const int64_t first = output_of(tile, vector), count = tile.outputs - first;
    float* const y = tile.y + row * tile.y_stride + first;
    write(y, tile.adds ? read(y, count) + sum : sum, count);
  }
};

// The products of some rows with some panels: block by block of the inputs, and in each block tile
// by tile of the rows, so that the block's weights are read from memory once.
template <class Weights>
void multiply_group(const Matrix& matrix, PanelGroup panels, PanelGroup next, const float* x,
                    int64_t x_stride, Range rows, float* y, int64_t y_stride, Store store) {
  using Family = FloatKernels<Weights>;
  const int64_t first = panels.first_output(), panel_elements = matrix.in_features * kPanel;
  const auto* weights = static_cast<const typename Weights::Element*>(matrix.panels);
  typename Family::Tile tile;
  tile.panel_elements = panels.step * panel_elements;
  tile.panel_outputs = panels.step * kPanel;
  tile.x_stride = x_stride;
  tile.y_stride = y_stride;
  tile.outputs = matrix.out_features - first;
  const auto inputs_from = [&](int64_t begin) {
    return std::min(kBlockInputs, matrix.in_features - begin);
  };
  for (int64_t begin = 0; begin < matrix.in_features; begin += kBlockInputs) {
    tile.weights = weights + panels.first * panel_elements + begin * kPanel;
    tile.inputs = inputs_from(begin);
    const bool is_last = begin + tile.inputs == matrix.in_features;
    const auto* next_weights =
        is_last ? weights + next.first * panel_elements : tile.weights + tile.inputs * kPanel;
    const int64_t num_next = inputs_from(is_last ? 0 : begin + tile.inputs);
    tile.bias = begin == 0 && matrix.bias ? matrix.bias + first : nullptr;
    tile.adds = begin > 0 || store == Store::kAdd;
    for_each_part(rows, Family::kMaxRows, [&](Range part, int64_t index, int64_t count) {
      tile.ahead = Ahead::of(index, count, tile.weights, next_weights, tile.inputs, num_next,
                             kPanel * sizeof(*tile.weights));
      tile.x = x + part.begin * x_stride + begin;
      tile.y = y + part.begin * y_stride + first;
      Kernels<Family>::of(part.end - part.begin, panels.count)(tile);
    });
  }
}

template <class Weights>
void multiply_by(const Matrix& matrix, const float* x, int64_t x_stride, int64_t rows, float* y,
                 int64_t y_stride, Store store, Team team) {
  for_each_group(num_panels(matrix), rows, kBlockRows, team,
                 [&](Range part, PanelGroup panels, PanelGroup next) {
                   multiply_group<Weights>(matrix, panels, next, x, x_stride, part, y, y_stride,
                                           store);
                 });
}

}  // namespace

void multiply_floats(const Matrix& matrix, const float* x, int64_t x_stride, int64_t rows, float* y,
                     int64_t y_stride, Store store, Team team) {
  switch (matrix.format) {
    case Format::kFloat32:
      return multiply_by<Float32>(matrix, x, x_stride, rows, y, y_stride, store, team);
    case Format::kBFloat16:
      return multiply_by<BFloat16>(matrix, x, x_stride, rows, y, y_stride, store, team);
    default:
      return multiply_by<Float16>(matrix, x, x_stride, rows, y, y_stride, store, team);
  }
}

}  // namespace specdec
