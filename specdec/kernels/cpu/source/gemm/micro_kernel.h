// Common parts of the GEMM micro-kernels, which compute a tile of few rows by few panels in
// registers.
#pragma once

#include <algorithm>
#include <array>
#include <utility>

#include "base/vector.h"
#include "gemm/packed_layout.h"

namespace specdec {

constexpr int kPanelVectors = kPanelOutputs / kLanes;

// The accumulators of a tile fill the registers, except those of its weights and one input. With
// few rows a kernel may take more panels.
constexpr int kTilePanels = kVectorBytes == 64 ? 3 : 1;
constexpr int kTileVectors = kTilePanels * kPanelVectors;
constexpr int kTileAccumulators = (kNumRegisters - kTileVectors - 1) / kTileVectors * kTileVectors;

// Panels that are computed together: as many as the kernel takes for the number of rows, or one
// where their number does not divide.
struct PanelGroup {
  int64_t first, stride, count;

  int64_t first_output() const { return first * kPanelOutputs; }
};

// Up to this many rows, the panels of a group are far apart in memory.
constexpr int64_t kMaxStridedRows = 8;

// One thread's panels of a matrix, as groups of Kernel::group_panels(rows).
//
// With few rows the kernel is bound by memory bandwidth: each panel of the next group follows the
// corresponding panel of this one, so that a thread reads `group_panels` long streams. With more
// rows panels are read several times from the cache, where adjacent panels cause fewer conflicts.
template <class Kernel>
class PanelPartition {
 public:
  PanelPartition(int64_t num_panels, int64_t rows, ThreadTeam owner)
      : rows_(rows),
        groups_(owner.share(num_panels / group_panels())),
        num_single_(owner.index + 1 == owner.size ? num_panels % group_panels() : 0) {}

  int64_t num_groups() const { return num_whole() + num_single_; }

  PanelGroup group(int64_t index) const {
    const int64_t count = group_panels(), first = groups_.begin * count;
    if (index >= num_whole()) return {first + num_whole() * (count - 1) + index, 1, 1};
    if (rows_ <= kMaxStridedRows) return {first + index, num_whole(), count};
    return {first + index * count, 1, count};
  }

 private:
  int64_t rows_;
  Range groups_;  // groups of group_panels() panels
  int64_t num_single_;

  int64_t num_whole() const { return groups_.end - groups_.begin; }
  int64_t group_panels() const { return Kernel::group_panels(rows_); }
};

// Run a stage of one GEMM: calls visit(part, panels, next) for parts of the rows, of at most
// `max_rows`, and groups of panels. next: the group that this thread is expected to compute next,
// or the same group if there is none.
template <class Kernel, class Visit>
void parallel_for_panels(int64_t num_panels, int64_t rows, int64_t max_rows, ThreadTeam team,
                         Visit visit) {
  using Partition = PanelPartition<Kernel>;
  const int64_t num_parts = (rows + max_rows - 1) / max_rows;
  const Partition own(num_panels, rows, {team.index, team.size});
  const auto share_of = [&](int64_t owner) {
    return owner == team.index ? own : Partition(num_panels, rows, {owner, team.size});
  };
  const auto count_of = [&](int64_t owner) { return num_parts * share_of(owner).num_groups(); };
  const int64_t total = num_parts * Partition(num_panels, rows, {0, 1}).num_groups();
  team.parallel_tasks(total, count_of, [&](int64_t owner, int64_t index) {
    const Partition partition = share_of(owner);
    const int64_t num_groups = partition.num_groups();
    const int64_t next_index = index + (owner == team.index ? 1 : -1);
    const bool is_whole = num_parts == 1;  // divisions would take a tenth of a small task
    const auto group = [&](int64_t task) {
      return partition.group(is_whole ? task : task % num_groups);
    };
    const PanelGroup panels = group(index);
    const bool is_last = next_index < 0 || next_index == num_parts * num_groups;
    const PanelGroup next = is_last ? panels : group(next_index);
    const ThreadTeam parts = {is_whole ? 0 : index / num_groups, num_parts};
    visit(is_whole ? Range{0, rows} : parts.share(rows), panels,
          next.count == panels.count ? next : panels);
  });
}

constexpr int kFirstLevel = 3, kSecondLevel = 2;  // as in prefetcht0 and prefetcht1

// Software prefetch of weights while a tile is computed.
//
// The only tile with its weights prefetches its own weights, a fixed distance ahead. Where several
// tiles share weights, these are in the cache after the first tile, and the memory would be idle:
// each of the first few tiles then prefetches a part of the next weights, so that the next first
// tile finds them in the cache too.
//
// Lines are prefetched to the second-level cache: the queue of the first level's misses is short, so
// prefetches to that one leave the memory idle while several rows are multiplied.
template <int64_t kDistance = 3072, int kLocality = kSecondLevel>
struct Prefetch {
  const char* start;  // in the first panel
  int64_t stride;     // bytes per step, in each panel

  // Prefetch one cache line for this step, of the panel at panel_offset bytes from the first one.
  void fetch_line(int64_t step, int64_t panel_offset) const {
    __builtin_prefetch(start + panel_offset + step * stride, 0, kLocality);
  }

  // Return the prefetch of tile `index` of the `count` tiles with the same weights. These start at
  // `weights` and have num_steps steps of `bytes` each; the next ones start at `next`, which may
  // equal `weights`, and have next_steps.
  static Prefetch plan(int64_t index, int64_t count, const void* weights, const void* next,
                       int64_t num_steps, int64_t next_steps, int64_t bytes) {
    const int64_t parts = std::min(count, kMaxParts);
    if (count == 1 || next == weights || index >= parts) {
      return {static_cast<const char*>(weights) + kDistance, bytes};
    }
    const int64_t stride = next_steps * bytes / (num_steps * parts);
    return {static_cast<const char*>(next) + index * num_steps * stride, stride};
  }

 private:
  static constexpr int64_t kMaxParts = 4;  // more parts would prefetch too few bytes per step
};

// Call visit(part, index, number of parts) for parts of `rows` of at most max_rows; their lengths
// differ by at most one.
template <class Visit>
void for_each_row_part(Range rows, int64_t max_rows, Visit visit) {
  const int64_t count = rows.end - rows.begin, parts = (count + max_rows - 1) / max_rows;
  for (int64_t index = 0; index < parts; ++index) {
    const Range part = ThreadTeam{index, parts}.share(count);
    visit(Range{rows.begin + part.begin, rows.begin + part.end}, index, parts);
  }
}

// Load up to kLanes of `count` values; missing lanes are zero.
inline Floats load_tail(const float* values, int64_t count) {
  if (count >= kLanes) return load<Floats>(values);
  Floats result = {};
  for (int64_t lane = 0; lane < count; ++lane) result[lane] = values[lane];
  return result;
}

inline void store_tail(float* values, Floats result, int64_t count) {
  if (count >= kLanes) return store(values, result);
  for (int64_t lane = 0; lane < count; ++lane) values[lane] = result[lane];
}

// Table of a micro-kernel's instances, for each number of rows and for full groups and single
// panels. A `Kernel` has a type `Tile`, a constant `kMaxRows`, and functions `group_panels(rows)`,
// `tile_panels(rows)`, the panels of a full tile, and `run<kRows, kPanels>(const Tile&)`.
template <class Kernel>
class KernelTable {
 public:
  using Function = void (*)(const typename Kernel::Tile&);

  static Function get(int64_t rows, int64_t panels) {
    using Counts = std::make_integer_sequence<int, Kernel::kMaxRows>;
    static constexpr Table kSinglePanel = table<false>(Counts{});
    static constexpr Table kFullGroup = table<true>(Counts{});
    return (panels == 1 ? kSinglePanel : kFullGroup)[rows - 1];
  }

 private:
  using Table = std::array<Function, Kernel::kMaxRows>;

  template <bool kIsFull, int... kRows>
  static constexpr Table table(std::integer_sequence<int, kRows...>) {
    return {Kernel::template run<kRows + 1, kIsFull ? Kernel::tile_panels(kRows + 1) : 1>...};
  }
};

}  // namespace specdec
