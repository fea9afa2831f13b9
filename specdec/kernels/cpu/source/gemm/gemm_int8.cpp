// GEMM with 8-bit weights: tiles of few quantized rows by few panels.
#include "gemm/gemm_int8.h"

#include "base/simd_math.h"
#include "gemm/int8_dot.h"
#include "gemm/micro_kernel.h"
#include "gemm/quantize_rows.h"

namespace specdec {
namespace {

constexpr int64_t kBlockRows = 64;  // their quantized values stay in the second-level cache

inline Floats to_floats(Ints values) { return __builtin_convertvector(values, Floats); }

// Broadcast four int8 values to every lane.
inline Ints broadcast_quad(const int8_t* quad) {
  int32_t bits;
  std::memcpy(&bits, quad, sizeof(bits));
  return bits - Ints{};
}

// Arguments of the micro-kernel: a few rows and a few panels.
struct Int8Tile {
  const uint8_t* weights;
  int64_t panel_bytes;  // from one panel to the next
  int64_t panel_outputs;
  int64_t quads;  // number of steps, of four inputs each
  Prefetch prefetch;
  int64_t num_groups, group_quads;  // groups that share a scale; quads in a group
  const float* row_scales;          // [rows, num_groups]
  const int32_t* compensations;     // [rows, kParts, num_groups]
  const int8_t* values;
  int64_t value_stride;
  float* y;
  int64_t y_stride;
  int64_t outputs;      // from the tile's first output to the matrix's last one
  const float* scales;  // [out_features], scales of the weights
  const float* bias;    // [out_features], or null
  Store store;
};

template <int kParts>
struct Int8MicroKernel {
  using Tile = Int8Tile;
  static constexpr int kMaxRows = kTileAccumulators / kTileVectors / kParts;

  template <int kRows, int kPanels>
  static void run(const Tile& tile) {
    constexpr int kVectors = kPanels * kPanelVectors;
    const auto store_sums = [&](int row, int vector, Floats sum) {
      store_tile_vector(tile, row, vector, sum);
    };
    if constexpr (kParts == 2) {  // one group holds all inputs
      accumulate_group<kRows, kPanels>(tile, 0, store_sums);
    } else {
      Floats totals[kRows][kVectors] = {};
      const auto add = [&](int row, int vector, Floats sum) { totals[row][vector] += sum; };
      for (int64_t group = 0; group < tile.num_groups; ++group) {
        accumulate_group<kRows, kPanels>(tile, group, add);
      }
      SPECDEC_UNROLL
      for (int row = 0; row < kRows; ++row) {
        SPECDEC_UNROLL
        for (int vector = 0; vector < kVectors; ++vector) {
          store_sums(row, vector, totals[row][vector]);
        }
      }
    }
  }

 private:
  // Multiply one group of inputs: calls emit(row, vector, sums) with its scaled sums.
  template <int kRows, int kPanels, class Emit>
  static SPECDEC_INLINE void accumulate_group(const Tile& tile, int64_t group, Emit emit) {
    constexpr int kVectors = kPanels * kPanelVectors, kPartRows = kRows * kParts;
    Ints sums[kPartRows][kVectors];
    SPECDEC_UNROLL
    for (int row = 0; row < kPartRows; ++row) {
      const int32_t begin = tile.compensations[row * tile.num_groups + group];
      SPECDEC_UNROLL
      for (int vector = 0; vector < kVectors; ++vector) sums[row][vector] = begin - Ints{};
    }
    const int64_t end = std::min((group + 1) * tile.group_quads, tile.quads);
    for (int64_t quad = group * tile.group_quads; quad < end; ++quad) {
      Ints weights[kVectors];
      SPECDEC_UNROLL
      for (int vector = 0; vector < kVectors; ++vector) {
        const uint8_t* panel = tile.weights + vector / kPanelVectors * tile.panel_bytes;
        const uint8_t* source =
            panel + (quad * kPanelOutputs + vector % kPanelVectors * kLanes) * kQuad;
        weights[vector] = load<Ints>(source);
      }
      SPECDEC_UNROLL
      for (int panel = 0; panel < kPanels; ++panel) {
        tile.prefetch.fetch_line(quad, panel * tile.panel_bytes);
      }
      SPECDEC_UNROLL
      for (int row = 0; row < kPartRows; ++row) {
        const Ints values = broadcast_quad(tile.values + row * tile.value_stride + quad * kQuad);
        SPECDEC_UNROLL
        for (int vector = 0; vector < kVectors; ++vector) {
          sums[row][vector] = dot_accumulate(sums[row][vector], weights[vector], values);
        }
      }
    }
    SPECDEC_UNROLL
    for (int row = 0; row < kRows; ++row) {
      const float scale = tile.row_scales[row * tile.num_groups + group];
      SPECDEC_UNROLL
      for (int vector = 0; vector < kVectors; ++vector) {
        Floats sum = to_floats(sums[row * kParts][vector]);
        if constexpr (kParts == 2) {
          sum += to_floats(sums[row * kParts + 1][vector]) * (1 / kLoStepsPerHi);
        }
        emit(row, vector, sum * scale);
      }
    }
  }

  static void store_tile_vector(const Tile& tile, int row, int vector, Floats sum) {
    const int64_t first =
        vector / kPanelVectors * tile.panel_outputs + vector % kPanelVectors * kLanes;
    const int64_t count = tile.outputs - first;
    float* const y = tile.y + row * tile.y_stride + first;
    Floats value = sum * load_tail(tile.scales + first, count);
    if (tile.bias) value += load_tail(tile.bias + first, count);
    if (tile.store == Store::kAccumulate) value += load_tail(y, count);
    store_tail(y, value, count);
  }
};

// Multiply `rows` by a group of panels, tile by tile of the rows. y: [rows, out_features].
template <int kParts>
void multiply_panels(const Matrix& matrix, PanelGroup panels, PanelGroup next,
                     const QuantizedRows& batch, Range rows, float* y, int64_t y_stride,
                     Store store) {
  using Kernel = Int8MicroKernel<kParts>;
  const QuantizedLayout& layout = batch.layout;
  const int64_t first = panels.first_output();
  const int64_t quads = num_steps(matrix);
  const int64_t panel_bytes = quads * kQuad * kPanelOutputs;
  Int8Tile tile;
  const auto* weights = static_cast<const uint8_t*>(matrix.packed);
  tile.weights = weights + panels.first * panel_bytes;
  tile.panel_bytes = panels.stride * panel_bytes;
  tile.panel_outputs = panels.stride * kPanelOutputs;
  tile.quads = quads;
  tile.group_quads = layout.group_size / kQuad;
  tile.num_groups = layout.num_groups;
  tile.value_stride = layout.stride;
  tile.y_stride = y_stride;
  tile.outputs = matrix.out_features - first;
  tile.scales = matrix.scales + first;
  tile.bias = matrix.bias ? matrix.bias + first : nullptr;
  tile.store = store;
  for_each_row_part(rows, Kernel::kMaxRows, [&](Range part, int64_t index, int64_t count) {
    tile.prefetch = Prefetch::plan(index, count, tile.weights, weights + next.first * panel_bytes,
                                   quads, quads, kPanelOutputs * kQuad);
    tile.row_scales = batch.scales + part.begin * layout.num_groups;
    tile.compensations = batch.compensations + part.begin * kParts * layout.num_groups;
    tile.values = batch.values + part.begin * kParts * layout.stride;
    tile.y = y + part.begin * y_stride + first;
    KernelTable<Kernel>::get(part.end - part.begin, panels.count)(tile);
  });
}

template <int kParts>
void gemm_parts(const Matrix& matrix, const QuantizedRows& batch, int64_t rows, float* y,
                int64_t y_stride, Store store, ThreadTeam team) {
  parallel_for_panels(num_panels(matrix), rows, kBlockRows, team,
                      [&](Range part, PanelGroup panels, PanelGroup next) {
                        multiply_panels<kParts>(matrix, panels, next, batch, part, y, y_stride,
                                                store);
                      });
}

}  // namespace

int64_t int8_scratch_bytes(const Matrix& matrix, int64_t rows) {
  return QuantizedLayout(matrix).bytes(rows);
}

void quantize_to_int8(const Matrix& matrix, const Activations& rows, Range own) {
  QuantizedRows batch(matrix, rows.count, rows.scratch);
  for (int64_t row = own.begin; row < own.end; ++row) {
    batch.quantize(row, rows.x + row * rows.stride, matrix.in_features);
  }
}

void gemm_int8(const Matrix& matrix, const Activations& rows, float* y, int64_t y_stride,
               Store store, ThreadTeam team) {
  const QuantizedRows batch(matrix, rows.count, rows.scratch);
  if (matrix.format == Format::kInt8) {
    gemm_parts<2>(matrix, batch, rows.count, y, y_stride, store, team);
  } else {
    gemm_parts<1>(matrix, batch, rows.count, y, y_stride, store, team);
  }
}

}  // namespace specdec
