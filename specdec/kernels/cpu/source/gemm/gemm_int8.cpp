// GEMM with 8-bit weights: tiles of few quantized rows by few panels.
#include "gemm/gemm_int8.h"

#include <type_traits>

#include "base/simd_math.h"
#include "gemm/int8_dot.h"
#include "gemm/micro_kernel.h"
#include "gemm/quantize_rows.h"

namespace specdec {
namespace {

constexpr int64_t kBlockRows = 64;  // their quantized values stay in the second-level cache

inline Floats convert_to_floats(Ints values) { return __builtin_convertvector(values, Floats); }

// Registers of a vector's weights.
constexpr int kWeightRegisters = sizeof(QuadWeights) / kVectorBytes;

// Few rows of pairs of 16 bits take so few instructions that their loads would overtake prefetches
// to the second level.
using WeightPrefetch = std::conditional_t<kHasByteDot, Prefetch<>, Prefetch<2048, kFirstLevel>>;

// Exact sum of products of kInt8, which may exceed 32 bits: high * 256 + low.
struct ExactSum {
  Ints high, low;

  void add(Ints sum) {
    high += sum >> 8;
    low += sum & 255;
  }

  // Add hi * kLoStepsPerHi + lo; 254 hi = 256 (hi - (hi >> 7)) - 2 (hi & 127).
  void add_parts(Ints hi, Ints lo) {
    high += hi - (hi >> 7);
    add(lo - 2 * (hi & 127));
  }

  Floats to_floats() const {
    const Ints carried = high + (low >> 8), rest = low & 255;
    return convert_to_floats(carried) * 256 + convert_to_floats(rest);
  }
};

// Arguments of the micro-kernel: a few rows and a few panels.
struct Int8Tile {
  const uint8_t* weights;
  int64_t panel_bytes;  // from one panel to the next
  int64_t panel_outputs;
  int64_t quads;  // number of steps, of four inputs each
  WeightPrefetch prefetch;
  int64_t num_groups, group_quads;  // groups that share a sum; quads in a group
  const float* row_scales;          // [rows, num_groups]
  const int32_t* compensations;     // [rows, kParts, num_groups]
  const QuantizedValue* values;
  int64_t value_stride;
  float* y;
  int64_t y_stride;
  int64_t outputs;      // from the tile's first output to the matrix's last one
  const float* scales;  // [out_features], scales of the weights
  const float* bias;    // [out_features], or null
  Store store;
};

template <Format kFormat>
struct Int8MicroKernel {
  using Tile = Int8Tile;
  static constexpr int kParts = num_parts(kFormat);
  static constexpr int kMaxRows = std::max(
      1, (kNumRegisters - kTileVectors * kWeightRegisters - 1) / kTileVectors / kParts);

  // Panels of a tile. One or two rows of pairs of 16 bits take three with AVX2, as streams that the
  // hardware prefetches.
  static constexpr int tile_panels(int64_t rows) {
    return kVectorBytes == 32 && !kHasByteDot && rows * kParts <= 2 ? 3 : kTilePanels;
  }
  static constexpr int group_panels(int64_t rows) { return tile_panels(rows); }

  template <int kRows, int kPanels>
  static void run(const Tile& tile) {
    constexpr int kVectors = kPanels * kPanelVectors;
    Total totals[kRows][kVectors] = {};
    const int64_t num_groups = kFormat == Format::kInt8 && kHasByteDot ? 1 : tile.num_groups;
    for (int64_t group = 0; group < num_groups; ++group) {
      accumulate_group<kRows, kPanels>(tile, group, totals);
    }
    SPECDEC_UNROLL
    for (int row = 0; row < kRows; ++row) {
      SPECDEC_UNROLL
      for (int vector = 0; vector < kVectors; ++vector) {
        if constexpr (kFormat == Format::kW8A8) {
          store_tile_vector(tile, row, vector, totals[row][vector]);
        } else {
          const Floats total = totals[row][vector].to_floats() * (1 / kLoStepsPerHi);
          store_tile_vector(tile, row, vector, total * tile.row_scales[row * tile.num_groups]);
        }
      }
    }
  }

 private:
  // kW8A8: the sum of scaled groups.
  using Total = std::conditional_t<kFormat == Format::kInt8, ExactSum, Floats>;

  static SPECDEC_INLINE QuadWeights load_weights(const Tile& tile, int vector, int64_t quad) {
    const uint8_t* panel = tile.weights + vector / kPanelVectors * tile.panel_bytes;
    const int64_t output = quad * kPanelOutputs + vector % kPanelVectors * kLanes;
    return unpack_weights(load<Ints>(panel + output * kQuad));
  }

  static SPECDEC_INLINE QuadValues load_values(const Tile& tile, int row, int64_t quad) {
    return broadcast_quad(tile.values + row * tile.value_stride + quad * kQuad);
  }

  // Multiply one group of inputs, and add its sums to the totals of each row and vector.
  template <int kRows, int kPanels>
  static SPECDEC_INLINE void accumulate_group(const Tile& tile, int64_t group,
                                              Total (&totals)[kRows][kPanels * kPanelVectors]) {
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
      if constexpr (kPanels > kTilePanels) {
        QuadValues values[kPartRows];
        SPECDEC_UNROLL
        for (int row = 0; row < kPartRows; ++row) values[row] = load_values(tile, row, quad);
        SPECDEC_UNROLL
        for (int vector = 0; vector < kVectors; ++vector) {
          const QuadWeights weights = load_weights(tile, vector, quad);
          SPECDEC_UNROLL
          for (int row = 0; row < kPartRows; ++row) {
            sums[row][vector] = dot_accumulate(sums[row][vector], weights, values[row]);
          }
        }
        continue;
      }
      QuadWeights weights[kVectors];
      SPECDEC_UNROLL
      for (int vector = 0; vector < kVectors; ++vector) {
        weights[vector] = load_weights(tile, vector, quad);
      }
      SPECDEC_UNROLL
      for (int panel = 0; panel < kPanels; ++panel) {
        tile.prefetch.fetch_line(quad, panel * tile.panel_bytes);
      }
      SPECDEC_UNROLL
      for (int row = 0; row < kPartRows; ++row) {
        const QuadValues values = load_values(tile, row, quad);
        SPECDEC_UNROLL
        for (int vector = 0; vector < kVectors; ++vector) {
          sums[row][vector] = dot_accumulate(sums[row][vector], weights[vector], values);
        }
      }
    }
    SPECDEC_UNROLL
    for (int row = 0; row < kRows; ++row) {
      SPECDEC_UNROLL
      for (int vector = 0; vector < kVectors; ++vector) {
        const Ints sum = sums[row * kParts][vector];
        Total& total = totals[row][vector];
        if constexpr (kFormat == Format::kW8A8) {
          const float scale = tile.row_scales[row * tile.num_groups + group];
          total += convert_to_floats(sum) * scale;
        } else if constexpr (kParts == 2) {
          total.add_parts(sum, sums[row * kParts + 1][vector]);
        } else {
          total.add(sum);
        }
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
template <Format kFormat>
void multiply_panels(const Matrix& matrix, PanelGroup panels, PanelGroup next,
                     const QuantizedRows& batch, Range rows, float* y, int64_t y_stride,
                     Store store) {
  using Kernel = Int8MicroKernel<kFormat>;
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
    tile.prefetch = WeightPrefetch::plan(index, count, tile.weights,
                                         weights + next.first * panel_bytes, quads, quads,
                                         kPanelOutputs * kQuad);
    tile.row_scales = batch.scales + part.begin * layout.num_groups;
    tile.compensations = batch.compensations + part.begin * layout.num_parts * layout.num_groups;
    tile.values = batch.values + part.begin * layout.num_parts * layout.stride;
    tile.y = y + part.begin * y_stride + first;
    KernelTable<Kernel>::get(part.end - part.begin, panels.count)(tile);
  });
}

template <Format kFormat>
void gemm_format(const Matrix& matrix, const QuantizedRows& batch, int64_t rows, float* y,
                int64_t y_stride, Store store, ThreadTeam team) {
  parallel_for_panels<Int8MicroKernel<kFormat>>(
      num_panels(matrix), rows, kBlockRows, team,
      [&](Range part, PanelGroup panels, PanelGroup next) {
        multiply_panels<kFormat>(matrix, panels, next, batch, part, y, y_stride, store);
      });
}

}  // namespace

int64_t int8_scratch_bytes(const Matrix& matrix, int64_t rows) {
  return QuantizedLayout(matrix).bytes(rows);
}

void quantize_to_int8(const Matrix& matrix, const Activations& rows, Range own) {
  QuantizedRows batch(matrix, rows.count, rows.scratch);
  for (int64_t row = own.begin; row < own.end; ++row) {
    batch.quantize(matrix, row, rows.x + row * rows.stride);
  }
}

void gemm_int8(const Matrix& matrix, const Activations& rows, float* y, int64_t y_stride,
               Store store, ThreadTeam team) {
  const QuantizedRows batch(matrix, rows.count, rows.scratch);
  if (matrix.format == Format::kInt8) {
    gemm_format<Format::kInt8>(matrix, batch, rows.count, y, y_stride, store, team);
  } else {
    gemm_format<Format::kW8A8>(matrix, batch, rows.count, y, y_stride, store, team);
  }
}

}  // namespace specdec
