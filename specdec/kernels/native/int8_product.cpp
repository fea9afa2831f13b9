#include "int8_product.h"

#include <algorithm>
#include <array>
#include <utility>

#include "int8_dot.h"
#include "int8_rows.h"
#include "panels.h"
#include "vector.h"

namespace specdec {
namespace {

constexpr int kPanelVectors = kPanel / kLanes;
constexpr int kTilePanels = kVectorBytes == 64 ? 3 : 1;
constexpr int kTileDigitRows = (kNumRegisters - kTilePanels * kPanelVectors - 1) /
                               (kTilePanels * kPanelVectors);
constexpr int64_t kBlockRows = 64;  // their digits stay in the second-level cache
constexpr int64_t kPrefetchBytes = 2048;

// A few rows and the panels that they are multiplied by.
struct Tile {
  const uint8_t* weights;
  int64_t panel_bytes;  // from one panel to the next
  int64_t quads;        // of inputs
  const DigitRow* rows;
  const int8_t* digits;
  int64_t digit_stride;
  float* y;
  int64_t y_stride;
  int64_t outputs;      // at most that many are written to each row
  const float* scales;  // of the outputs
  const float* bias;    // or null
  Store store;
};

inline Floats read(const float* values, int64_t count) {
  if (count >= kLanes) return load<Floats>(values);
  Floats result = {};
  for (int64_t lane = 0; lane < count; ++lane) result[lane] = values[lane];
  return result;
}

inline void write(float* y, Floats values, int64_t count) {
  if (count >= kLanes) return store(y, values);
  for (int64_t lane = 0; lane < count; ++lane) y[lane] = values[lane];
}

inline Floats to_floats(Ints values) { return __builtin_convertvector(values, Floats); }

inline Ints spread(const int8_t* quad) {
  int32_t bits;
  std::memcpy(&bits, quad, sizeof(bits));
  return bits - Ints{};
}

// Scales the sums of one row and vector of outputs, beginning at `first`, and stores them.
template <int kDigits>
inline void finish(const Tile& tile, int row, int64_t first, const Ints* sums) {
  const int64_t count = tile.outputs - first;
  Floats value = to_floats(sums[0]);
  if constexpr (kDigits == 2) value += to_floats(sums[1]) * (1 / kStepsOfSecond);
  value *= read(tile.scales + first, count) * tile.rows[row].scale;
  if (tile.bias) value += read(tile.bias + first, count);
  float* const y = tile.y + row * tile.y_stride + first;
  if (tile.store == Store::kAdd) value += read(y, count);
  write(y, value, count);
}

template <int kDigits, int kRows, int kPanels>
void run_tile(const Tile& tile) {
  constexpr int kVectors = kPanels * kPanelVectors;
  Ints sums[kRows][kVectors][kDigits];
  SPECDEC_UNROLL
  for (int row = 0; row < kRows; ++row) {
    SPECDEC_UNROLL
    for (int vector = 0; vector < kVectors; ++vector) {
      SPECDEC_UNROLL
      for (int digit = 0; digit < kDigits; ++digit) {
        sums[row][vector][digit] = tile.rows[row].corrections[digit] - Ints{};
      }
    }
  }
  for (int64_t quad = 0; quad < tile.quads; ++quad) {
    Ints weights[kVectors];
    SPECDEC_UNROLL
    for (int vector = 0; vector < kVectors; ++vector) {
      const uint8_t* panel = tile.weights + vector / kPanelVectors * tile.panel_bytes;
      const uint8_t* source =
          panel + (quad * kPanel + vector % kPanelVectors * kLanes) * kQuad;
      weights[vector] = load<Ints>(source);
      __builtin_prefetch(source + kPrefetchBytes);
    }
    SPECDEC_UNROLL
    for (int row = 0; row < kRows; ++row) {
      SPECDEC_UNROLL
      for (int digit = 0; digit < kDigits; ++digit) {
        const Ints x =
            spread(tile.digits + (row * kDigits + digit) * tile.digit_stride + quad * kQuad);
        SPECDEC_UNROLL
        for (int vector = 0; vector < kVectors; ++vector) {
          sums[row][vector][digit] = add_dots(sums[row][vector][digit], weights[vector], x);
        }
      }
    }
  }
  SPECDEC_UNROLL
  for (int row = 0; row < kRows; ++row) {
    SPECDEC_UNROLL
    for (int vector = 0; vector < kVectors; ++vector) {
      if (vector * kLanes < tile.outputs) {
        finish<kDigits>(tile, row, vector * kLanes, sums[row][vector]);
      }
    }
  }
}

using Kernel = void (*)(const Tile&);

template <int kDigits>
constexpr int kTileRows = kTileDigitRows / kDigits;

template <int kDigits>
using KernelsByRows = std::array<Kernel, kTileRows<kDigits>>;

template <int kDigits, int kPanels, int... kRows>
constexpr KernelsByRows<kDigits> kernels_of(std::integer_sequence<int, kRows...>) {
  return {run_tile<kDigits, kRows + 1, kPanels>...};
}

template <int kDigits, int... kPanels>
constexpr std::array<KernelsByRows<kDigits>, kTilePanels> all_kernels(
    std::integer_sequence<int, kPanels...>) {
  using Rows = std::make_integer_sequence<int, kTileRows<kDigits>>;
  return {kernels_of<kDigits, kPanels + 1>(Rows{})...};
}

template <int kDigits>
Kernel kernel_for(int64_t rows, int64_t panels) {
  static constexpr auto kKernels =
      all_kernels<kDigits>(std::make_integer_sequence<int, kTilePanels>{});
  return kKernels[panels - 1][rows - 1];
}

// The products of some rows with some panels, tile by tile of the rows.
template <int kDigits>
void multiply_panels(const Matrix& matrix, Range panels, const DigitRows& batch, Range rows,
                     float* y, int64_t y_stride, Store store) {
  const int64_t first = panels.begin * kPanel, count = rows.end - rows.begin;
  const int64_t tiles = (count + kTileRows<kDigits> - 1) / kTileRows<kDigits>;
  Tile tile;
  tile.quads = (matrix.in_features + kQuad - 1) / kQuad;
  tile.panel_bytes = tile.quads * kQuad * kPanel;
  tile.weights = static_cast<const uint8_t*>(matrix.panels) + panels.begin * tile.panel_bytes;
  tile.digit_stride = batch.stride;
  tile.y_stride = y_stride;
  tile.outputs = matrix.out_features - first;
  tile.scales = matrix.scales + first;
  tile.bias = matrix.bias ? matrix.bias + first : nullptr;
  tile.store = store;
  for (int64_t index = 0; index < tiles; ++index) {
    const Range part = Team{index, tiles}.share(count);
    const int64_t row = rows.begin + part.begin;
    tile.rows = batch.rows + row;
    tile.digits = batch.digits + row * kDigits * batch.stride;
    tile.y = y + row * y_stride + first;
    kernel_for<kDigits>(part.end - part.begin, panels.end - panels.begin)(tile);
  }
}

template <int kDigits>
void multiply_digits(const Matrix& matrix, const DigitRows& batch, int64_t rows, float* y,
                     int64_t y_stride, Store store, Team team) {
  const Range own = team.share(num_panels(matrix));
  for (int64_t row = 0; row < rows; row += kBlockRows) {
    const Range block = {row, std::min(row + kBlockRows, rows)};
    for (int64_t panel = own.begin; panel < own.end; panel += kTilePanels) {
      const Range few = {panel, std::min(panel + kTilePanels, own.end)};
      multiply_panels<kDigits>(matrix, few, batch, block, y, y_stride, store);
    }
  }
}

}  // namespace

int64_t int8_scratch_bytes(const Matrix& matrix, int64_t rows) {
  return DigitRows::bytes(matrix, rows);
}

void multiply_int8(const Matrix& matrix, const float* x, int64_t x_stride, int64_t rows, float* y,
                   int64_t y_stride, Store store, void* scratch, Team team) {
  DigitRows batch(matrix, rows, scratch);
  const Range own = team.share(rows);
  for (int64_t row = own.begin; row < own.end; ++row) {
    batch.fill(row, x + row * x_stride, matrix.in_features);
  }
  team.barrier();
  if (matrix.format == Format::kInt8) {
    multiply_digits<2>(matrix, batch, rows, y, y_stride, store, team);
  } else {
    multiply_digits<1>(matrix, batch, rows, y, y_stride, store, team);
  }
}

}  // namespace specdec
