#include "float_product.h"

#include <algorithm>
#include <array>
#include <utility>

#ifdef __F16C__
#include <immintrin.h>
#endif

#include "panels.h"
#include "vector.h"

namespace specdec {
namespace {

constexpr int kPanelVectors = kPanel / kLanes;

// A tile's sums fill the registers, with room for its weights and one input.
constexpr int kTilePanels = kVectorBytes == 64 ? 3 : 1;
constexpr int kTileRows = (kNumRegisters - kTilePanels * kPanelVectors - 1) /
                          (kTilePanels * kPanelVectors);

// Inputs that are summed before the sum is added to the output. Their weights, and those inputs of
// kBlockRows rows, stay in the second-level cache. Part of the definition of a product: a block's
// sum is rounded as one number.
constexpr int64_t kBlockInputs = 1024;
constexpr int64_t kBlockRows = 8 * kTileRows;

// How far ahead weights are fetched, in each panel's stream.
constexpr int64_t kPrefetchBytes = 2048;

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
struct Tile {
  const Element* weights;
  int64_t panel_elements;  // from one panel to the next
  int64_t inputs;          // in this block
  const float* x;
  int64_t x_stride;
  float* y;
  int64_t y_stride;
  int64_t outputs;    // at most that many are written to each row
  const float* bias;  // what sums begin with, or null
  bool adds;          // to what y holds
};

inline void write(float* y, Floats sum, int64_t outputs, bool adds) {
  if (outputs >= kLanes) {
    store(y, adds ? load<Floats>(y) + sum : sum);
    return;
  }
  for (int64_t lane = 0; lane < outputs; ++lane) y[lane] = adds ? y[lane] + sum[lane] : sum[lane];
}

inline Floats read(const float* values, int64_t count) {
  if (count >= kLanes) return load<Floats>(values);
  Floats result = {};
  for (int64_t lane = 0; lane < count; ++lane) result[lane] = values[lane];
  return result;
}

template <class Weights, int kRows, int kPanels>
void run_tile(const Tile<typename Weights::Element>& tile) {
  constexpr int kVectors = kPanels * kPanelVectors;
  Floats sums[kRows][kVectors];
  SPECDEC_UNROLL
  for (int vector = 0; vector < kVectors; ++vector) {
    const int64_t first = vector * kLanes;
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
      __builtin_prefetch(source + kPrefetchBytes / sizeof(*source));
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
    for (int vector = 0; vector < kVectors; ++vector) {
      const int64_t first = vector * kLanes;
      write(tile.y + row * tile.y_stride + first, sums[row][vector], tile.outputs - first,
            tile.adds);
    }
  }
}

template <class Weights>
using Kernel = void (*)(const Tile<typename Weights::Element>&);

template <class Weights>
using KernelsByRows = std::array<Kernel<Weights>, kTileRows>;

template <class Weights, int kPanels, int... kRows>
constexpr KernelsByRows<Weights> kernels_of(std::integer_sequence<int, kRows...>) {
  return {run_tile<Weights, kRows + 1, kPanels>...};
}

template <class Weights, int... kPanels>
constexpr std::array<KernelsByRows<Weights>, kTilePanels> all_kernels(
    std::integer_sequence<int, kPanels...>) {
  using Rows = std::make_integer_sequence<int, kTileRows>;
  return {kernels_of<Weights, kPanels + 1>(Rows{})...};
}

template <class Weights>
Kernel<Weights> kernel_for(int64_t rows, int64_t panels) {
  static constexpr auto kKernels =
      all_kernels<Weights>(std::make_integer_sequence<int, kTilePanels>{});
  return kKernels[panels - 1][rows - 1];
}

// The products of some rows with some panels: block by block of the inputs, and in each block tile
// by tile of the rows, so that the block's weights are read from memory once.
template <class Weights>
void multiply_panels(const Matrix& matrix, Range panels, const float* x, int64_t x_stride,
                     int64_t rows, float* y, int64_t y_stride, Store store) {
  const int64_t panel_elements = matrix.in_features * kPanel;
  const int64_t first = panels.begin * kPanel;
  const int64_t tiles = (rows + kTileRows - 1) / kTileRows;
  const auto* weights = static_cast<const typename Weights::Element*>(matrix.panels);
  for (int64_t begin = 0; begin < matrix.in_features; begin += kBlockInputs) {
    Tile<typename Weights::Element> tile;
    tile.weights = weights + panels.begin * panel_elements + begin * kPanel;
    tile.panel_elements = panel_elements;
    tile.inputs = std::min(kBlockInputs, matrix.in_features - begin);
    tile.x_stride = x_stride;
    tile.y_stride = y_stride;
    tile.outputs = matrix.out_features - first;
    tile.bias = begin == 0 && matrix.bias ? matrix.bias + first : nullptr;
    tile.adds = begin > 0 || store == Store::kAdd;
    for (int64_t index = 0; index < tiles; ++index) {
      const Range part = Team{index, tiles}.share(rows);
      tile.x = x + part.begin * x_stride + begin;
      tile.y = y + part.begin * y_stride + first;
      kernel_for<Weights>(part.end - part.begin, panels.end - panels.begin)(tile);
    }
  }
}

template <class Weights>
void multiply_with(const Matrix& matrix, const float* x, int64_t x_stride, int64_t rows, float* y,
                   int64_t y_stride, Store store, Team team) {
  const Range own = team.share(num_panels(matrix));
  for (int64_t row = 0; row < rows; row += kBlockRows) {
    const int64_t count = std::min(kBlockRows, rows - row);
    for (int64_t panel = own.begin; panel < own.end;) {
      const Range few = {panel, std::min(panel + kTilePanels, own.end)};
      multiply_panels<Weights>(matrix, few, x + row * x_stride, x_stride, count,
                               y + row * y_stride, y_stride, store);
      panel = few.end;
    }
  }
}

}  // namespace

void multiply_floats(const Matrix& matrix, const float* x, int64_t x_stride, int64_t rows, float* y,
                     int64_t y_stride, Store store, Team team) {
  switch (matrix.format) {
    case Format::kFloat32:
      return multiply_with<Float32>(matrix, x, x_stride, rows, y, y_stride, store, team);
    case Format::kBFloat16:
      return multiply_with<BFloat16>(matrix, x, x_stride, rows, y, y_stride, store, team);
    default:
      return multiply_with<Float16>(matrix, x, x_stride, rows, y, y_stride, store, team);
  }
}

}  // namespace specdec
