// What the products of all formats have in common: few rows by few panels, kept in registers.
#pragma once

#include <algorithm>
#include <array>
#include <utility>

#include "packed_layout.h"
#include "vector.h"

namespace specdec {

constexpr int kPanelVectors = kPanelOutputs / kLanes;

// A tile's sums fill the registers, with room for its weights and one input.
constexpr int kTilePanels = kVectorBytes == 64 ? 3 : 1;
constexpr int kTileVectors = kTilePanels * kPanelVectors;
constexpr int kTileAccumulators = (kNumRegisters - kTileVectors - 1) / kTileVectors * kTileVectors;

// The panels of one tile: kTilePanels of them, or a single one where a share does not divide.
struct PanelGroup {
  int64_t first, stride, count;

  int64_t first_output() const { return first * kPanelOutputs; }
};

// Up to so many rows the panels of a group are far apart.
constexpr int64_t kMaxStridedRows = 8;

// The panels of one thread's share of a matrix, group by group.
//
// For few rows memory sets the pace: in the next group each panel is followed by the one that lies
// behind it, so a thread reads kTilePanels long streams. For more rows panels are read several
// times from the cache, where neighbours get in each other's way less.
class PanelPartition {
 public:
  PanelPartition(int64_t num_panels, ThreadTeam owner)
      : groups_(owner.share(num_panels / kTilePanels)),
        num_single_(owner.index + 1 == owner.size ? num_panels % kTilePanels : 0) {}

  int64_t num_groups() const { return num_whole() + num_single_; }

  PanelGroup group(int64_t index, int64_t rows) const {
    const int64_t first = groups_.begin * kTilePanels;
    if (index >= num_whole()) return {first + num_whole() * (kTilePanels - 1) + index, 1, 1};
    if (rows <= kMaxStridedRows) return {first + index, num_whole(), kTilePanels};
    return {first + index * kTilePanels, 1, kTilePanels};
  }

 private:
  Range groups_;  // groups of kTilePanels
  int64_t num_single_;

  int64_t num_whole() const { return groups_.end - groups_.begin; }
};

// A stage that divides a product: calls visit(part, panels, next) for parts of the rows, of at most
// `most_rows`, and groups of panels. next: the group that this thread is likely to come to then, or
// the same one if there is none.
template <class Visit>
void parallel_for_panels(int64_t num_panels, int64_t rows, int64_t max_rows, ThreadTeam team,
                         Visit visit) {
  const int64_t num_parts = (rows + max_rows - 1) / max_rows;
  const auto share_of = [&](int64_t owner) {
    return PanelPartition(num_panels, {owner, team.size});
  };
  const auto count_of = [&](int64_t owner) { return num_parts * share_of(owner).num_groups(); };
  const int64_t total = num_parts * (num_panels / kTilePanels + num_panels % kTilePanels);
  team.parallel_tasks(total, count_of, [&](int64_t owner, int64_t index) {
    const PanelPartition partition = share_of(owner);
    const int64_t num_groups = partition.num_groups();
    const int64_t next_index = index + (owner == team.index ? 1 : -1);
    const PanelGroup panels = partition.group(index % num_groups, rows);
    const bool is_last = next_index < 0 || next_index == num_parts * num_groups;
    const PanelGroup next = is_last ? panels : partition.group(next_index % num_groups, rows);
    visit(ThreadTeam{index / num_groups, num_parts}.share(rows), panels,
          next.count == panels.count ? next : panels);
  });
}

// What a tile fetches from memory or a farther cache while it computes.
//
// Where it is the only one with its weights, those that it comes to itself in a moment. Else the
// weights are in the cache after the first tile at the latest, and memory would be idle: a few
// tiles fetch a part each of the weights that come next, so that the first tile finds them there
// too.
//
// A forward pass nearly always reads more weights than caches hold, so those that no other tile
// wants are fetched past the farther caches where the processor can: what others keep in there
// stays, as the code and data of the processes that serve the model do.
struct Prefetch {
  const char* start;  // in the first panel
  int64_t stride;     // bytes from one step to the next; the same in each panel
  bool is_streaming;

  // A line for this step, of the panel that lies so many bytes behind the first one.
  void fetch_line(int64_t step, int64_t panel_offset) const {
    const char* const line = start + panel_offset + step * stride;
    if (is_streaming) {
      __builtin_prefetch(line, 0, 0);
    } else {
      __builtin_prefetch(line);
    }
  }

  // Of tile `index` of `count` with the same weights. They begin at `weights` and have num_steps of
  // `bytes` each; what comes next begins at `next` and has num_next of them, or is the same.
  static Prefetch plan(int64_t index, int64_t count, const void* weights, const void* next,
                       int64_t num_steps, int64_t next_steps, int64_t bytes) {
    const int64_t parts = std::min(count, kMaxParts);
    if (count == 1 || next == weights || index >= parts) {
      return {static_cast<const char*>(weights) + kPrefetchDistance, bytes, count == 1};
    }
    const int64_t stride = next_steps * bytes / (num_steps * parts);
    return {static_cast<const char*>(next) + index * num_steps * stride, stride, false};
  }

 private:
  static constexpr int64_t kPrefetchDistance = 3072;
  static constexpr int64_t kMaxParts = 4;  // with more, a step would be too few bytes to divide
};

// Visits `rows` in parts of at most `most`, of which none is more than one longer than another:
// calls visit(part, index, number of parts).
template <class Visit>
void for_each_row_part(Range rows, int64_t max_rows, Visit visit) {
  const int64_t count = rows.end - rows.begin, parts = (count + max_rows - 1) / max_rows;
  for (int64_t index = 0; index < parts; ++index) {
    const Range part = ThreadTeam{index, parts}.share(count);
    visit(Range{rows.begin + part.begin, rows.begin + part.end}, index, parts);
  }
}

// Of values that end after `count`, the first few; beyond are zeros.
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

// The kernels of a family for each number of rows, and for as many panels as a group has. A family
// has a type `Tile`, a constant `kMaxRows`, and a function `run<kRows, kPanels>(const Tile&)`.
template <class Kernel>
class KernelTable {
 public:
  using Function = void (*)(const typename Kernel::Tile&);

  static Function get(int64_t rows, int64_t panels) {
    using Counts = std::make_integer_sequence<int, Kernel::kMaxRows>;
    static constexpr Table kSinglePanel = table<1>(Counts{});
    static constexpr Table kFullGroup = table<kTilePanels>(Counts{});
    return (panels == 1 ? kSinglePanel : kFullGroup)[rows - 1];
  }

 private:
  using Table = std::array<Function, Kernel::kMaxRows>;

  template <int kPanels, int... kRows>
  static constexpr Table table(std::integer_sequence<int, kRows...>) {
    return {Kernel::template run<kRows + 1, kPanels>...};
  }
};

}  // namespace specdec
