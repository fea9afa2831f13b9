// GEMM with floating-point weights: tiles of few rows by few panels.
#include "gemm/gemm_float.h"

#include <algorithm>

#include "base/simd_math.h"
#include "gemm/float_formats.h"
#include "gemm/micro_kernel.h"

namespace specdec {
namespace {

// Cache blocking. The inputs of a block are summed before the sum is added to the output. The
// weights of a block, those of the next block, which are prefetched, and the inputs of kBlockRows
// rows fit a second-level cache of 1 MiB. kBlockInputs determines results: the sum of each block is
// rounded once.
constexpr int64_t kBlockInputs = 1024;
constexpr int64_t kBlockRows = 72;

constexpr int64_t kLineBytes = 64;  // cache line

// Arguments of the micro-kernel: one block of inputs of a few rows, and a few panels.
template <class Weights>
struct FloatTile {
  const typename Weights::Element* weights;
  int64_t panel_elements;  // from one panel of the group to the next; 0 for a single panel
  int64_t panel_outputs;
  int64_t steps;  // in this block
  Prefetch<> prefetch;
  const typename Weights::Input* x;
  int64_t x_stride;
  float* y;
  int64_t y_stride;
  int64_t outputs;    // from the tile's first output to the matrix's last one
  const float* bias;  // initial value of the sums, or null
  bool accumulate;    // add to y instead of overwriting it
};

template <class Weights>
struct FloatMicroKernel {
  using Tile = FloatTile<Weights>;
  static constexpr int kMaxRows = kTileAccumulators / kTileVectors;

  // Panels of a tile. With AVX2, one panel of a few rows has too few sums to hide the latency of a
  // product, and memory serves several streams faster than one.
  static constexpr int tile_panels(int64_t rows) {
    if (kVectorBytes != 32 || rows > kMaxStreamedRows) return kTilePanels;
    return rows == 3 ? 2 : 3;
  }

  // With AVX2, up to two tiles of rows prefetch the next group's panels as two streams: memory
  // serves them faster than one. 16-bit weights of a single tile need less bandwidth.
  static constexpr int group_panels(int64_t rows) {
    constexpr int kUnsplitRows = kIsWide ? kMaxStreamedRows : kMaxRows;
    const bool is_split = rows > kUnsplitRows && rows <= 2 * kMaxRows;
    return is_split && kPrefetchedPanels > 1 ? kPrefetchedPanels : tile_panels(rows);
  }

  // Aligned, since another position of its loop makes a kernel up to 5 % slower.
  template <int kRows, int kPanels>
  __attribute__((aligned(64))) static void run(const Tile& tile) {
    constexpr int kVectors = kPanels * kPanelVectors;
    constexpr int kRowsInRegisters =
        kPanels > kTilePanels ? std::min(kRows, kTileAccumulators / kVectors) : kRows;
    Floats sums[kRows][kVectors];
    SPECDEC_UNROLL
    for (int vector = 0; vector < kVectors; ++vector) {
      const int64_t first = output_offset(tile, vector);
      const Floats begin =
          tile.bias ? load_tail(tile.bias + first, tile.outputs - first) : Floats{};
      SPECDEC_UNROLL
      for (int row = 0; row < kRows; ++row) sums[row][vector] = begin;
    }
    if constexpr (kRows == kRowsInRegisters) {
      accumulate<kRows, kPanels>(tile, sums);
    } else {
      accumulate_in_parts<kRowsInRegisters, kPanels>(tile, sums, kRows);
    }
    SPECDEC_UNROLL
    for (int row = 0; row < kRows; ++row) {
      SPECDEC_UNROLL
      for (int vector = 0; vector < kVectors; ++vector) {
        store_tile_vector(tile, row, vector, sums[row][vector]);
      }
    }
  }

 private:
  static constexpr bool kIsWide = sizeof(typename Weights::Element) == 4;
  static constexpr int kMaxStreamedRows = kIsWide ? 4 : 3;  // prefetched by hardware with AVX2
  static constexpr int kPrefetchedPanels = kVectorBytes == 32 && Weights::kTerms == 1 ? 2 : 1;
  static constexpr int64_t kChunkSteps = 32;  // their weights stay in the first-level cache

  // Add the products of all steps to the sums of `rows` rows, which exceed the registers: chunk by
  // chunk of the steps, for kRows at a time.
  template <int kRows, int kPanels>
  static SPECDEC_INLINE void accumulate_in_parts(const Tile& tile,
                                                 Floats (*sums)[kPanels * kPanelVectors],
                                                 int rows) {
    constexpr int kVectors = kPanels * kPanelVectors;
    Tile chunk = tile;
    for (int64_t step = 0; step < tile.steps; step += kChunkSteps) {
      chunk.steps = std::min(kChunkSteps, tile.steps - step);
      chunk.weights = tile.weights + step * kPanelOutputs * Weights::kInputs;
      for (int row = 0; row < rows; row += kRows) {
        chunk.x = tile.x + row * tile.x_stride + step * Weights::kInputs;
        auto* part = sums + row;
        load_again(part);  // or else the compiler would try to keep all sums in registers
        Floats own[kRows][kVectors];
        SPECDEC_UNROLL
        for (int sum = 0; sum < kRows * kVectors; ++sum) {
          own[sum / kVectors][sum % kVectors] = part[sum / kVectors][sum % kVectors];
        }
        accumulate<kRows, kPanels>(chunk, own);
        SPECDEC_UNROLL
        for (int sum = 0; sum < kRows * kVectors; ++sum) {
          part[sum / kVectors][sum % kVectors] = own[sum / kVectors][sum % kVectors];
        }
      }
    }
  }

  // Add the products of all steps of a tile to its sums.
  template <int kRows, int kPanels>
  static SPECDEC_INLINE void accumulate(const Tile& tile,
                                        Floats (&sums)[kRows][kPanels * kPanelVectors]) {
    constexpr int kVectors = kPanels * kPanelVectors;
    // With more streams, software prefetches would delay those of the hardware.
    constexpr bool kIsStreamed = kPanels > kTilePanels;
    constexpr int kPrefetched = kIsStreamed ? 0 : std::max(kPanels, kPrefetchedPanels);
    // Registers hold the inputs of a term or else its weights, beside the sums.
    constexpr bool kHoldsInputs = kIsStreamed && kRows > 1;
    // Registers cannot hold the loaded weights of all terms beside the sums, an input and a mask.
    constexpr bool kIsTight =
        Weights::kTerms > 1 &&
        (kHoldsInputs ||
         (!kIsStreamed && (kRows + Weights::kTerms) * kVectors + 2 >= kNumRegisters));
    for (int64_t step = 0; step < tile.steps; ++step) {
      SPECDEC_UNROLL
      for (int panel = 0; panel < kPrefetched; ++panel) {
        tile.prefetch.fetch_line(step, panel * tile.panel_elements * sizeof(*tile.weights));
      }
      SPECDEC_UNROLL
      for (int term = 0; term < Weights::kTerms; ++term) {
        Floats inputs[kRows], weights[kVectors];
        if constexpr (kHoldsInputs) {
          SPECDEC_UNROLL
          for (int row = 0; row < kRows; ++row) {
            inputs[row] = load_input<true>(tile, row, step, term);
          }
          SPECDEC_UNROLL
          for (int product = 0; product < kRows * kVectors; ++product) {
            const int row = product % kRows, vector = product / kRows;
            if (row == 0) weights[vector] = load_weights<kIsTight, kRows>(tile, vector, step, term);
            sums[row][vector] = add_product(sums[row][vector], weights[vector], inputs[row]);
          }
        } else {
          SPECDEC_UNROLL
          for (int vector = 0; vector < kVectors; ++vector) {
            weights[vector] = load_weights<kIsTight, kRows>(tile, vector, step, term);
          }
          SPECDEC_UNROLL
          for (int row = 0; row < kRows; ++row) {
            inputs[row] = load_input<false>(tile, row, step, term);
            SPECDEC_UNROLL
            for (int vector = 0; vector < kVectors; ++vector) {
              sums[row][vector] = add_product(sums[row][vector], weights[vector], inputs[row]);
            }
          }
        }
      }
    }
  }

  template <bool kIsTight, int kRows>
  static SPECDEC_INLINE Floats load_weights(const Tile& tile, int vector, int64_t step, int term) {
    const auto* panel = tile.weights + vector / kPanelVectors * tile.panel_elements;
    const int64_t output = step * kPanelOutputs + vector % kPanelVectors * kLanes;
    const auto* source = panel + output * Weights::kInputs;
    if (kIsTight) load_again(source);
    Floats weights = Weights::weights(source, term);
    if (kRows > 1) pin_register(weights);
    return weights;
  }

  static SPECDEC_INLINE Floats add_product(Floats sum, Floats weights, Floats input) {
    sum = Weights::add_product(sum, weights, input);
    if (Weights::kTerms > 1) pin_sum(sum, weights, input);
    return sum;
  }

  template <bool kIsHeld>
  static SPECDEC_INLINE Floats load_input(const Tile& tile, int row, int64_t step, int term) {
    Floats input = Weights::input(tile.x + row * tile.x_stride + step * Weights::kInputs, term);
    if (kIsHeld) pin_register(input);
    return input;
  }

  static int64_t output_offset(const Tile& tile, int vector) {
    return vector / kPanelVectors * tile.panel_outputs + vector % kPanelVectors * kLanes;
  }

  static void store_tile_vector(const Tile& tile, int row, int vector, Floats sum) {
    const int64_t first = output_offset(tile, vector), count = tile.outputs - first;
    float* const y = tile.y + row * tile.y_stride + first;
    store_tail(y, tile.accumulate ? load_tail(y, count) + sum : sum, count);
  }
};

// Multiply `rows` by a group of panels: block by block of the inputs, and within a block tile by
// tile of the panels and rows, so that the block's weights are read from memory once.
// x: [rows, in_features]; y: [rows, out_features].
template <class Weights>
void multiply_panels(const Matrix& matrix, PanelGroup panels, PanelGroup next,
                     const typename Weights::Input* x, int64_t x_stride, Range rows, float* y,
                     int64_t y_stride, Store store) {
  using Kernel = FloatMicroKernel<Weights>;
  constexpr int64_t kBlockSteps = kBlockInputs / Weights::kInputs;
  constexpr int64_t kStepElements = kPanelOutputs * Weights::kInputs;
  const int64_t first = panels.first_output(), steps = num_steps(matrix);
  const bool is_split = panels.count > Kernel::tile_panels(rows.end - rows.begin);
  const int64_t num_tiles = is_split ? panels.count : 1, tile_panels = is_split ? 1 : panels.count;
  const auto* weights = static_cast<const typename Weights::Element*>(matrix.packed);
  typename Kernel::Tile tile;
  tile.panel_elements = panels.count > 1 ? panels.stride * steps * kStepElements : 0;
  tile.panel_outputs = panels.stride * kPanelOutputs;
  tile.x_stride = x_stride;
  tile.y_stride = y_stride;
  const auto steps_from = [&](int64_t begin) { return std::min(kBlockSteps, steps - begin); };
  for (int64_t begin = 0; begin < steps; begin += kBlockSteps) {
    const auto* const block = weights + (panels.first * steps + begin) * kStepElements;
    tile.steps = steps_from(begin);
    const bool is_last = begin + tile.steps == steps;
    const auto* next_block = is_last ? weights + next.first * steps * kStepElements
                                     : block + tile.steps * kStepElements;
    const int64_t next_steps = steps_from(is_last ? 0 : begin + tile.steps);
    tile.accumulate = begin > 0 || store == Store::kAccumulate;
    for (int64_t panel = 0; panel < num_tiles; ++panel) {
      const int64_t output = first + panel * tile.panel_outputs;
      tile.weights = block + panel * tile.panel_elements;
      tile.outputs = matrix.out_features - output;
      tile.bias = begin == 0 && matrix.bias ? matrix.bias + output : nullptr;
      for_each_row_part(rows, Kernel::kMaxRows, [&](Range part, int64_t index, int64_t count) {
        tile.prefetch =
            Prefetch<>::plan(panel * count + index, num_tiles * count, block, next_block,
                             tile.steps, next_steps, kStepElements * sizeof(*block));
        tile.x = x + part.begin * x_stride + begin * Weights::kInputs;
        tile.y = y + part.begin * y_stride + output;
        KernelTable<Kernel>::get(part.end - part.begin, tile_panels)(tile);
      });
    }
  }
}

template <class Weights>
void gemm_as(const Matrix& matrix, const typename Weights::Input* x, int64_t x_stride, int64_t rows,
             float* y, int64_t y_stride, Store store, ThreadTeam team) {
  parallel_for_panels<FloatMicroKernel<Weights>>(
      num_panels(matrix), rows, kBlockRows, team,
      [&](Range part, PanelGroup panels, PanelGroup next) {
        multiply_panels<Weights>(matrix, panels, next, x, x_stride, part, y, y_stride, store);
      });
}

// Division of one product of a grouped GEMM into tasks: parts of its rows by parts of its panels.
struct GroupedTasks {
  int64_t num_row_parts, num_panel_parts;

  // size: threads; count: products of the stage. Rows are divided only where the panels are too few
  // for the threads, since every part reads the weights.
  GroupedTasks(const GroupedProduct& product, int64_t count, int64_t size) {
    const int64_t groups = ceil_div(num_panels(*product.matrix), kTilePanels);
    num_panel_parts = std::min(groups, ceil_div(2 * size, count));
    const int64_t wanted = ceil_div(size, count * num_panel_parts);
    num_row_parts = std::max(ceil_div(product.rows, kBlockRows),
                             std::min(wanted, ceil_div(product.rows, kMinGroupedRows)));
  }

  int64_t count() const { return num_row_parts * num_panel_parts; }

 private:
  static constexpr int64_t kMinGroupedRows = 4;
};

template <class Weights>
void multiply_part(const GroupedProduct& product, Range rows, Range panels) {
  for (int64_t panel = panels.begin; panel < panels.end;) {
    const bool is_group = panels.end - panel >= kTilePanels;
    const PanelGroup group = {panel, 1, is_group ? kTilePanels : 1};
    panel += group.count;
    const bool has_next = panels.end - panel >= group.count;
    const PanelGroup next = {has_next ? panel : group.first, 1, group.count};
    multiply_panels<Weights>(*product.matrix, group, next, product.x, product.x_stride, rows,
                             product.y, product.y_stride, product.store);
  }
}

void multiply_part(const GroupedProduct& product, Range rows, Range panels) {
  switch (product.matrix->format) {
    case Format::kFloat32:
      return multiply_part<Float32>(product, rows, panels);
    case Format::kShortFloat32:
      return multiply_part<ShortFloat32>(product, rows, panels);
    default:
      return multiply_part<Float16>(product, rows, panels);
  }
}

// Run one of the tasks of a product.
void run_task(const GroupedProduct& product, const GroupedTasks& tasks, int64_t task) {
  const ThreadTeam rows = {task / tasks.num_panel_parts, tasks.num_row_parts};
  const ThreadTeam panels = {task % tasks.num_panel_parts, tasks.num_panel_parts};
  multiply_part(product, rows.share(product.rows), panels.share(num_panels(*product.matrix)));
}

// Return the stride of the converted activations, in elements.
int64_t bfloat16_stride(const Matrix& matrix) {
  return round_up(matrix.in_features, kLineBytes / sizeof(BFloat16::Input));
}

}  // namespace

int64_t float_scratch_bytes(const Matrix& matrix, int64_t rows) {
  if (matrix.format != Format::kBFloat16) return 0;
  return rows * bfloat16_stride(matrix) * sizeof(BFloat16::Input);
}

void convert_to_bfloat16(const Matrix& matrix, const Activations& rows, Range own) {
  const int64_t stride = bfloat16_stride(matrix);
  for (int64_t row = own.begin; row < own.end; ++row) {
    auto* const to = static_cast<BFloat16::Input*>(rows.scratch) + row * stride;
    const float* const from = rows.x + row * rows.stride;
    for (int64_t input = 0; input < matrix.in_features; ++input) {
      to[input] = BFloat16::round(from[input]);
    }
    std::fill(to + matrix.in_features, to + stride, BFloat16::Input{});
  }
}

void gemm_float(const Matrix& matrix, const Activations& rows, float* y, int64_t y_stride,
                Store store, ThreadTeam team) {
  const auto* const converted = static_cast<const BFloat16::Input*>(rows.scratch);
  switch (matrix.format) {
    case Format::kFloat32:
      return gemm_as<Float32>(matrix, rows.x, rows.stride, rows.count, y, y_stride, store, team);
    case Format::kBFloat16:
      return gemm_as<BFloat16>(matrix, converted, bfloat16_stride(matrix), rows.count, y, y_stride,
                               store, team);
    case Format::kShortFloat32:
      return gemm_as<ShortFloat32>(matrix, rows.x, rows.stride, rows.count, y, y_stride, store,
                                   team);
    default:
      return gemm_as<Float16>(matrix, rows.x, rows.stride, rows.count, y, y_stride, store, team);
  }
}

void gemm_grouped(const GroupedProduct* products, int64_t count, ThreadTeam team) {
  const auto tasks_of = [&](int64_t index) {
    return GroupedTasks(products[index], count, team.size);
  };
  int64_t total = 0;
  for (int64_t index = 0; index < count; ++index) total += tasks_of(index).count();
  team.parallel_for(total, [&](int64_t task) {
    int64_t index = 0;
    while (task >= tasks_of(index).count()) task -= tasks_of(index++).count();
    run_task(products[index], tasks_of(index), task);
  });
}

void gemm_stacked(const StackedProducts& products, ThreadTeam team) {
  const int64_t step = round_up(products.out_features, kPanelOutputs);
  Matrix first = *products.stacked;
  first.out_features = products.out_features;
  const GroupedProduct shape = {&first,     products.x,        products.x_stride, products.rows,
                                products.y, products.y_stride, Store::kOverwrite};
  const GroupedTasks tasks(shape, products.count, team.size);
  team.parallel_for(products.count * tasks.count(), [&](int64_t index) {
    const int64_t own = index / tasks.count();
    Matrix matrix = outputs_from(*products.stacked, own * step);
    matrix.out_features = products.out_features;
    GroupedProduct product = shape;
    product.matrix = &matrix;
    product.x += own * products.x_step;
    product.y += own * products.y_step;
    run_task(product, tasks, index % tasks.count());
  });
}

}  // namespace specdec
