// What the products of all formats have in common: few rows by few panels, kept in registers.
#pragma once

#include <algorithm>
#include <array>
#include <utility>

#include "panels.h"
#include "vector.h"

namespace specdec {

constexpr int kPanelVectors = kPanel / kLanes;

// A tile's sums fill the registers, with room for its weights and one input.
constexpr int kTilePanels = kVectorBytes == 64 ? 3 : 1;
constexpr int kTileVectors = kTilePanels * kPanelVectors;
constexpr int kTileSums = (kNumRegisters - kTileVectors - 1) / kTileVectors * kTileVectors;

// How far ahead of its products a tile fetches weights, in each panel's stream.
constexpr int64_t kPrefetchBytes = 2048;

// The panels of one tile: kTilePanels of them, or a single one where a range does not divide.
struct PanelGroup {
  int64_t first, step, count;

  int64_t first_output() const { return first * kPanel; }
};

// Up to so many rows the panels of a group are far apart; see `for_each_group`.
constexpr int64_t kFewRows = 8;

// Visits the panels of a range, group by group, for products with `rows` rows.
//
// For few rows memory sets the pace: in the next group each panel is followed by the one that lies
// behind it, so a thread reads kTilePanels long streams. For more rows panels are read several
// times from the cache, where neighbours get in each other's way less.
template <class Visit>
void for_each_group(Range panels, int64_t rows, Visit visit) {
  const int64_t length = (panels.end - panels.begin) / kTilePanels;
  for (int64_t index = 0; index < length; ++index) {
    if (rows <= kFewRows) {
      visit(PanelGroup{panels.begin + index, length, kTilePanels});
    } else {
      visit(PanelGroup{panels.begin + index * kTilePanels, 1, kTilePanels});
    }
  }
  for (int64_t panel = panels.begin + length * kTilePanels; panel < panels.end; ++panel) {
    visit(PanelGroup{panel, 1, 1});
  }
}

// Visits `rows` in parts of at most `most`, of which none is more than one longer than another.
template <class Visit>
void for_each_part(Range rows, int64_t most, Visit visit) {
  const int64_t count = rows.end - rows.begin, parts = (count + most - 1) / most;
  for (int64_t index = 0; index < parts; ++index) {
    const Range part = Team{index, parts}.share(count);
    visit(Range{rows.begin + part.begin, rows.begin + part.end});
  }
}

// Of values that end after `count`, the first few; beyond are zeros.
inline Floats read(const float* values, int64_t count) {
  if (count >= kLanes) return load<Floats>(values);
  Floats result = {};
  for (int64_t lane = 0; lane < count; ++lane) result[lane] = values[lane];
  return result;
}

inline void write(float* values, Floats result, int64_t count) {
  if (count >= kLanes) return store(values, result);
  for (int64_t lane = 0; lane < count; ++lane) values[lane] = result[lane];
}

// The kernels of a family for each number of rows, and for as many panels as a group has. A family
// has a type `Tile`, a constant `kMaxRows`, and a function `run<kRows, kPanels>(const Tile&)`.
template <class Family>
class Kernels {
 public:
  using Kernel = void (*)(const typename Family::Tile&);

  static Kernel of(int64_t rows, int64_t panels) {
    using Rows = std::make_integer_sequence<int, Family::kMaxRows>;
    static constexpr Table kSingle = table<1>(Rows{}), kWhole = table<kTilePanels>(Rows{});
    return (panels == 1 ? kSingle : kWhole)[rows - 1];
  }

 private:
  using Table = std::array<Kernel, Family::kMaxRows>;

  template <int kPanels, int... kRows>
  static constexpr Table table(std::integer_sequence<int, kRows...>) {
    return {Family::template run<kRows + 1, kPanels>...};
  }
};

}  // namespace specdec
