#include "int8_product.h"

#include "int8_dot.h"
#include "int8_rows.h"
#include "lanes.h"
#include "tiles.h"

namespace specdec {
namespace {

constexpr int64_t kBlockRows = 64;  // their digits stay in the second-level cache

inline Floats to_floats(Ints values) { return __builtin_convertvector(values, Floats); }

// Four digits in every lane.
inline Ints spread(const int8_t* quad) {
  int32_t bits;
  std::memcpy(&bits, quad, sizeof(bits));
  return bits - Ints{};
}

// A few rows, and the panels that they are multiplied by.
struct Int8Tile {
  const uint8_t* weights;
  int64_t panel_bytes;  // from one panel to the next
  int64_t panel_outputs;
  int64_t quads;  // of inputs
  Ahead ahead;
  int64_t num_groups, group_quads;  // of quads that share a scale; in each
  const float* row_scales;          // [rows, num_groups]
  const int32_t* corrections;       // [rows, kDigits, num_groups]
  const int8_t* digits;
  int64_t digit_stride;
  float* y;
  int64_t y_stride;
  int64_t outputs;      // from the first of the tile to the last of the matrix
  const float* scales;  // of the outputs
  const float* bias;    // or null
  Store store;
};

template <int kDigits>
struct Int8Kernels {
  using Tile = Int8Tile;
  static constexpr int kMaxRows = kTileSums / kTileVectors / kDigits;

  template <int kRows, int kPanels>
  static void run(const Tile& tile) {
    constexpr int kVectors = kPanels * kPanelVectors;
    const auto put = [&](int row, int vector, Floats sum) { finish(tile, row, vector, sum); };
    if constexpr (kDigits == 2) {  // all inputs are one group
      multiply<kRows, kPanels>(tile, 0, put);
    } else {
      Floats totals[kRows][kVectors] = {};
      const auto add = [&](int row, int vector, Floats sum) { totals[row][vector] += sum; };
      for (int64_t group = 0; group < tile.num_groups; ++group) {
        multiply<kRows, kPanels>(tile, group, add);
      }
      SPECDEC_UNROLL
      for (int row = 0; row < kRows; ++row) {
        SPECDEC_UNROLL
        for (int vector = 0; vector < kVectors; ++vector) put(row, vector, totals[row][vector]);
      }
    }
  }

 private:
  // Calls visit(row, vector, sums) with the products of one group of inputs.
  template <int kRows, int kPanels, class Visit>
  static SPECDEC_INLINE void multiply(const Tile& tile, int64_t group, Visit visit) {
    constexpr int kVectors = kPanels * kPanelVectors, kDigitRows = kRows * kDigits;
    Ints sums[kDigitRows][kVectors];
    SPECDEC_UNROLL
    for (int row = 0; row < kDigitRows; ++row) {
      const int32_t begin = tile.corrections[row * tile.num_groups + group];
      SPECDEC_UNROLL
      for (int vector = 0; vector < kVectors; ++vector) sums[row][vector] = begin - Ints{};
    }
    const int64_t end = std::min((group + 1) * tile.group_quads, tile.quads);
    for (int64_t quad = group * tile.group_quads; quad < end; ++quad) {
      Ints weights[kVectors];
      SPECDEC_UNROLL
      for (int vector = 0; vector < kVectors; ++vector) {
        const uint8_t* panel = tile.weights + vector / kPanelVectors * tile.panel_bytes;
        const uint8_t* source = panel + (quad * kPanel + vector % kPanelVectors * kLanes) * kQuad;
        weights[vector] = load<Ints>(source);
      }
      SPECDEC_UNROLL
      for (int panel = 0; panel < kPanels; ++panel) {
        tile.ahead.fetch(quad, panel * tile.panel_bytes);
      }
      SPECDEC_UNROLL
      for (int row = 0; row < kDigitRows; ++row) {
        const Ints digits = spread(tile.digits + row * tile.digit_stride + quad * kQuad);
        SPECDEC_UNROLL
        for (int vector = 0; vector < kVectors; ++vector) {
          sums[row][vector] = add_dots(sums[row][vector], weights[vector], digits);
        }
      }
    }
    SPECDEC_UNROLL
    for (int row = 0; row < kRows; ++row) {
      const float scale = tile.row_scales[row * tile.num_groups + group];
      SPECDEC_UNROLL
      for (int vector = 0; vector < kVectors; ++vector) {
        Floats sum = to_floats(sums[row * kDigits][vector]);
        if constexpr (kDigits == 2) {
          sum += to_floats(sums[row * kDigits + 1][vector]) * (1 / kStepsOfSecond);
        }
        visit(row, vector, sum * scale);
      }
    }
  }

  static void finish(const Tile& tile, int row, int vector, Floats sum) {
    const int64_t first =
        vector / kPanelVectors * tile.panel_outputs + vector % kPanelVectors * kLanes;
    const int64_t count = tile.outputs - first;
    float* const y = tile.y + row * tile.y_stride + first;
    Floats value = sum * read(tile.scales + first, count);
    if (tile.bias) value += read(tile.bias + first, count);
    if (tile.store == Store::kAdd) value += read(y, count);
    write(y, value, count);
  }
};

// The products of some rows with some panels, tile by tile of the rows.
template <int kDigits>
void multiply_group(const Matrix& matrix, PanelGroup panels, PanelGroup next,
                    const DigitRows& batch, Range rows, float* y, int64_t y_stride, Store store) {
  using Family = Int8Kernels<kDigits>;
  const DigitLayout& layout = batch.layout;
  const int64_t first = panels.first_output();
  const int64_t quads = num_steps(matrix);
  const int64_t panel_bytes = quads * kQuad * kPanel;
  Int8Tile tile;
  const auto* weights = static_cast<const uint8_t*>(matrix.panels);
  tile.weights = weights + panels.first * panel_bytes;
  tile.panel_bytes = panels.apart * panel_bytes;
  tile.panel_outputs = panels.apart * kPanel;
  tile.quads = quads;
  tile.group_quads = layout.group / kQuad;
  tile.num_groups = layout.num_groups;
  tile.digit_stride = layout.stride;
  tile.y_stride = y_stride;
  tile.outputs = matrix.out_features - first;
  tile.scales = matrix.scales + first;
  tile.bias = matrix.bias ? matrix.bias + first : nullptr;
  tile.store = store;
  for_each_part(rows, Family::kMaxRows, [&](Range part, int64_t index, int64_t count) {
    tile.ahead = Ahead::of(index, count, tile.weights, weights + next.first * panel_bytes, quads,
                           quads, kPanel * kQuad);
    tile.row_scales = batch.scales + part.begin * layout.num_groups;
    tile.corrections = batch.corrections + part.begin * kDigits * layout.num_groups;
    tile.digits = batch.digits + part.begin * kDigits * layout.stride;
    tile.y = y + part.begin * y_stride + first;
    Kernels<Family>::of(part.end - part.begin, panels.count)(tile);
  });
}

template <int kDigits>
void multiply_digits(const Matrix& matrix, const DigitRows& batch, int64_t rows, float* y,
                     int64_t y_stride, Store store, Team team) {
  for_each_group(num_panels(matrix), rows, kBlockRows, team,
                 [&](Range part, PanelGroup panels, PanelGroup next) {
                   multiply_group<kDigits>(matrix, panels, next, batch, part, y, y_stride, store);
                 });
}

}  // namespace

int64_t int8_scratch_bytes(const Matrix& matrix, int64_t rows) {
  return DigitLayout(matrix).bytes(rows);
}

void round_to_digits(const Matrix& matrix, const Rows& rows, Range own) {
  DigitRows batch(matrix, rows.count, rows.scratch);
  for (int64_t row = own.begin; row < own.end; ++row) {
    batch.fill(row, rows.x + row * rows.stride, matrix.in_features);
  }
}

void multiply_int8(const Matrix& matrix, const Rows& rows, float* y, int64_t y_stride, Store store,
                   Team team) {
  const DigitRows batch(matrix, rows.count, rows.scratch);
  if (matrix.format == Format::kInt8) {
    multiply_digits<2>(matrix, batch, rows.count, y, y_stride, store, team);
  } else {
    multiply_digits<1>(matrix, batch, rows.count, y, y_stride, store, team);
  }
}

}  // namespace specdec
