// Ranks write parts of a tensor into slots of a shared region, tell each other by `Arrival`s, and
// read the others' slots. There are two slots a rank, for even and odd rounds, and that is enough
// for one wait a round: whoever writes round n has seen every rank arrive at n - 1, so each of them
// has read all of n - 2, which lay where n goes.
#include "reduce.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <new>

#include "arrivals.h"
#include "numbers.h"

namespace specdec {

namespace {

constexpr int64_t kSlotBytes = 256 * 1024;  // the slots of two ranks fit into a core's own cache
constexpr int64_t kManyBytes = 256 * 1024;  // more is copied and summed by all threads
constexpr int64_t kBlock = 512;             // elements that are summed at a time
// Ranks of one model seldom come further apart. Longer gains nothing, not at all costs 35 us more.
constexpr auto kAwake = std::chrono::microseconds(300);
constexpr auto kLivenessPeriod = std::chrono::milliseconds(100);

int threads_for(int64_t bytes) { return bytes > kManyBytes ? omp_get_max_threads() : 1; }

int64_t region_bytes(int64_t size) { return size * (sizeof(Arrival) + 2 * kSlotBytes); }

}  // namespace

struct Reducer {
  int fd;  // of the region; the rank holds a lock on its byte `rank` for as long as it lives
  int64_t rank, size;
  Clock::duration timeout;
  char* region;                      // the arrivals of all ranks, then their slots
  uint32_t round = 0;                // the last that is over
  std::atomic<int32_t> failure{0};   // 1 + the rank that is lost; negative: that disagrees

  Arrival& arrival(int64_t of_rank) const { return reinterpret_cast<Arrival*>(region)[of_rank]; }

  char* slot(int64_t of_rank, uint32_t in_round) const {
    return region + size * sizeof(Arrival) + (2 * of_rank + (in_round & 1)) * kSlotBytes;
  }

  bool has_failed() const { return failure.load(std::memory_order_relaxed) != 0; }

  // Whether the process of `peer` has ended: the kernel has then dropped its lock.
  bool has_ended(int64_t peer) const {
    struct flock lock = {};
    lock.l_type = F_WRLCK;
    lock.l_whence = SEEK_SET;
    lock.l_start = peer;
    lock.l_len = 1;
    return fcntl(fd, F_GETLK, &lock) == 0 && lock.l_type == F_UNLCK;
  }

  bool await(int64_t peer, uint32_t wanted) const {
    Arrival& theirs = arrival(peer);
    if (theirs.await_briefly(wanted, kAwake)) return true;
    const auto end = Clock::now() + timeout;
    while (!theirs.await_asleep(wanted, kLivenessPeriod)) {
      // What it announced before it ended counts.
      if (has_ended(peer) || Clock::now() > end) return theirs.has_reached(wanted);
      if (has_failed()) return false;  // another thread knows better
    }
    return true;
  }

  // Waits until every rank is there and means the same; false once that has failed.
  bool await_all(uint32_t wanted, int64_t claim) {
    for (int64_t peer = 0; peer < size && !has_failed(); ++peer) {
      if (peer == rank) continue;
      if (!await(peer, wanted)) {
        fail(static_cast<int32_t>(peer + 1));
      } else if (arrival(peer).claims[wanted & 1] != claim) {
        fail(-static_cast<int32_t>(peer + 1));
      }
    }
    return !has_failed();
  }

  void fail(int32_t reason) {
    int32_t none = 0;
    failure.compare_exchange_strong(none, reason);  // the first reason stays
  }
};

namespace {

// One collective, in as many rounds as it has parts: write(part, slot) puts this thread's share of
// a part into this rank's slot, and read(part, round) takes its share out of everybody's. After a
// failure the threads go on to the end without waiting, so that they leave together; but they write
// and announce nothing more: a peer whose patience is longer would read what was written too early.
template <typename Write, typename Read>
bool exchange(Reducer& reducer, int64_t claim, int64_t num_parts, Team team, Write write,
              Read read) {
  // Nobody may fail before all have seen that the collective before did not.
  team.barrier();
  const uint32_t before = reducer.round;
  for (int64_t part = 0; part < num_parts; ++part) {
    const uint32_t round = before + 1 + static_cast<uint32_t>(part);
    if (!reducer.has_failed()) write(part, reducer.slot(reducer.rank, round));
    team.barrier();
    if (team.index == 0 && !reducer.has_failed()) {
      Arrival& own = reducer.arrival(reducer.rank);
      own.claims[round & 1] = claim;
      own.announce(round);
    }
    if (reducer.await_all(round, claim)) read(part, round);
  }
  team.barrier();
  if (team.index == 0) reducer.round = before + static_cast<uint32_t>(num_parts);
  return !reducer.has_failed();
}

// Numbers as they are stored, and what they are added up in. Integers wrap around.
template <typename T>
struct Plain {
  using Stored = T;
  using Sum = T;
  static Sum load(Stored value) { return value; }
  static Stored store(Sum sum) { return sum; }
};

struct Half {
  using Stored = _Float16;
  using Sum = float;
  static Sum load(Stored value) { return static_cast<float>(value); }
  static Stored store(Sum sum) { return static_cast<_Float16>(sum); }
};

struct BFloat16 {
  using Stored = uint16_t;
  using Sum = float;

  static Sum load(Stored value) {
    const uint32_t bits = static_cast<uint32_t>(value) << 16;
    float sum;
    std::memcpy(&sum, &bits, sizeof sum);
    return sum;
  }

  static Stored store(Sum sum) { return Numbers<Format::kBFloat16>::narrow(sum); }
};

// Sums elements `own` of a part over the slots into out.
template <typename Number>
void add_slots(const Reducer& reducer, uint32_t round, Range own, typename Number::Stored* out) {
  using Stored = typename Number::Stored;
  typename Number::Sum sums[kBlock];
  for (int64_t begin = own.begin; begin < own.end; begin += kBlock) {
    const int64_t count = std::min(kBlock, own.end - begin);
    for (int64_t rank = 0; rank < reducer.size; ++rank) {
      const Stored* theirs = reinterpret_cast<const Stored*>(reducer.slot(rank, round)) + begin;
      for (int64_t i = 0; i < count; ++i) {
        const auto value = Number::load(theirs[i]);
        sums[i] = rank == 0 ? value : static_cast<typename Number::Sum>(sums[i] + value);
      }
    }
    for (int64_t i = 0; i < count; ++i) out[begin + i] = Number::store(sums[i]);
  }
}

template <typename Number>
bool reduce(Reducer& reducer, void* data, int64_t count, int64_t kind, Team team) {
  using Stored = typename Number::Stored;
  constexpr int64_t kPerPart = kSlotBytes / static_cast<int64_t>(sizeof(Stored));
  auto* values = static_cast<Stored*>(data);
  const auto length = [&](int64_t part) { return std::min(kPerPart, count - part * kPerPart); };
  const auto write = [&](int64_t part, char* slot) {
    const Range own = team.share(length(part));
    std::copy(values + part * kPerPart + own.begin, values + part * kPerPart + own.end,
              reinterpret_cast<Stored*>(slot) + own.begin);
  };
  const auto read = [&](int64_t part, uint32_t round) {
    add_slots<Number>(reducer, round, team.share(length(part)), values + part * kPerPart);
  };
  const int64_t num_parts = (count + kPerPart - 1) / kPerPart;
  return exchange(reducer, kind << 56 | count, num_parts, team, write, read);
}

// own: [bytes]; all: [size, bytes].
bool gather(Reducer& reducer, const char* own, int64_t bytes, char* all, Team team) {
  const auto length = [&](int64_t part) { return std::min(kSlotBytes, bytes - part * kSlotBytes); };
  const auto write = [&](int64_t part, char* slot) {
    const Range share = team.share(length(part));
    std::copy(own + part * kSlotBytes + share.begin, own + part * kSlotBytes + share.end,
              slot + share.begin);
  };
  const auto read = [&](int64_t part, uint32_t round) {
    const Range share = team.share(length(part));
    for (int64_t rank = 0; rank < reducer.size; ++rank) {
      const char* theirs = reducer.slot(rank, round);
      std::copy(theirs + share.begin, theirs + share.end,
                all + rank * bytes + part * kSlotBytes + share.begin);
    }
  };
  const int64_t num_parts = (bytes + kSlotBytes - 1) / kSlotBytes;
  return exchange(reducer, bytes, num_parts, team, write, read);
}

// What a tensor holds, by the numbers that SharedMemory gives them; 0 is a gather's claim.
enum Kind : int32_t { kFloat32 = 1, kFloat64, kFloat16, kBFloat16, kInt32, kInt64 };

bool reduce(Reducer& reducer, int32_t kind, void* data, int64_t count, Team team) {
  switch (kind) {
    case kFloat32: return reduce<Plain<float>>(reducer, data, count, kind, team);
    case kFloat64: return reduce<Plain<double>>(reducer, data, count, kind, team);
    case kFloat16: return reduce<Half>(reducer, data, count, kind, team);
    case kBFloat16: return reduce<BFloat16>(reducer, data, count, kind, team);
    case kInt32: return reduce<Plain<uint32_t>>(reducer, data, count, kind, team);
    case kInt64: return reduce<Plain<uint64_t>>(reducer, data, count, kind, team);
  }
  __builtin_unreachable();
}

}  // namespace

bool all_reduce(Reducer* reducer, float* data, int64_t count, Team team) {
  return reduce(*reducer, kFloat32, data, count, team);
}

bool all_gather(Reducer* reducer, const void* own, int64_t bytes, void* all, Team team) {
  return gather(*reducer, static_cast<const char*>(own), bytes, static_cast<char*>(all), team);
}

int64_t num_ranks(const Reducer* reducer) { return reducer->size; }

}  // namespace specdec

using specdec::Reducer;
using specdec::Team;

SPECDEC_EXPORT int64_t specdec_region_bytes(int64_t size) { return specdec::region_bytes(size); }

// Maps the region of `fd` (specdec_region_bytes, all zeros) and takes this rank's lock in it. Owns
// `fd` from then on: closing any other descriptor of the region here would drop the lock. Null
// where the system refuses, with `fd` still the caller's.
SPECDEC_EXPORT Reducer* specdec_open_reducer(int32_t fd, int64_t rank, int64_t size,
                                             double timeout_s) {
  struct flock lock = {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = rank;
  lock.l_len = 1;
  if (fcntl(fd, F_SETLK, &lock) != 0) return nullptr;
  void* region =
      mmap(nullptr, specdec::region_bytes(size), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (region == MAP_FAILED) return nullptr;
  const auto timeout = std::chrono::duration<double>(timeout_s);
  return new Reducer{fd, rank, size,
                     std::chrono::duration_cast<specdec::Clock::duration>(timeout),
                     static_cast<char*>(region)};
}

// Its peers see this rank as ended.
SPECDEC_EXPORT void specdec_close_reducer(Reducer* reducer) {
  munmap(reducer->region, specdec::region_bytes(reducer->size));
  close(reducer->fd);
  delete reducer;
}

// 0 none, 1 + a rank that is lost, -(1 + one that disagrees).
SPECDEC_EXPORT int32_t specdec_reducer_failure(const Reducer* reducer) { return reducer->failure; }

// Returns the reducer's failure from then on.
SPECDEC_EXPORT int32_t specdec_all_reduce(Reducer* reducer, int32_t kind, void* data,
                                          int64_t count) {
  specdec::run_team(specdec::threads_for(count * 4),
                    [&](Team team) { specdec::reduce(*reducer, kind, data, count, team); });
  return reducer->failure;
}

// part: [bytes]; all: [size, bytes]. Returns like specdec_all_reduce.
SPECDEC_EXPORT int32_t specdec_all_gather(Reducer* reducer, const char* part, int64_t bytes,
                                          char* all) {
  specdec::run_team(specdec::threads_for(bytes),
                    [&](Team team) { specdec::gather(*reducer, part, bytes, all, team); });
  return reducer->failure;
}
