// Each rank writes chunks of a tensor to its slots of the shared region, publishes its progress
// (RankProgress), and reads the slots of the other ranks. Each rank has two slots, for even and odd
// rounds, so that one wait per round is enough: a rank that writes round n has seen every rank
// publish n - 1, and so all ranks have read round n - 2, which occupied the same slot.
#include "collectives/allreduce.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <new>

#include "collectives/rank_barrier.h"
#include "gemm/format_convert.h"

namespace specdec {

namespace {

constexpr int64_t kSlotBytes =
    256 * 1024;  // the slots of two ranks fit into a core's private cache
constexpr int64_t kMultithreadBytes =
    256 * 1024;                          // larger tensors are copied and summed by all threads
constexpr int64_t kBlockElements = 512;  // elements that are summed at a time
// Ranks of one model rarely arrive further apart. A longer spin gains nothing; no spin costs 35 us.
constexpr auto kSpinTime = std::chrono::microseconds(300);
constexpr auto kLivenessPeriod = std::chrono::milliseconds(100);

int threads_for(int64_t bytes, int num_threads) {
  return bytes > kMultithreadBytes ? num_threads : 1;
}

int64_t region_bytes(int64_t size) { return size * (sizeof(RankProgress) + 2 * kSlotBytes); }

}  // namespace

struct Communicator {
  int fd;  // of the region; this rank holds a lock on byte `rank` while it lives
  int64_t rank, size;
  Clock::duration timeout;
  char* region;        // the RankProgress of all ranks, then their slots
  uint32_t round = 0;  // last completed round
  std::atomic<int32_t> failure{
      0};  // 1 + lost rank; -(1 + rank that called another collective); 0 if none

  RankProgress& progress(int64_t of_rank) const {
    return reinterpret_cast<RankProgress*>(region)[of_rank];
  }

  char* slot(int64_t of_rank, uint32_t in_round) const {
    return region + size * sizeof(RankProgress) + (2 * of_rank + (in_round & 1)) * kSlotBytes;
  }

  bool has_failed() const { return failure.load(std::memory_order_relaxed) != 0; }

  // Return whether the process of `peer` has ended; the kernel then releases its lock.
  bool has_ended(int64_t peer) const {
    struct flock lock = {};
    lock.l_type = F_WRLCK;
    lock.l_whence = SEEK_SET;
    lock.l_start = peer;
    lock.l_len = 1;
    return fcntl(fd, F_GETLK, &lock) == 0 && lock.l_type == F_UNLCK;
  }

  bool wait_for(int64_t peer, uint32_t wanted) const {
    RankProgress& peer_progress = progress(peer);
    if (peer_progress.spin_wait(wanted, kSpinTime)) return true;
    const auto end = Clock::now() + timeout;
    while (!peer_progress.futex_wait(wanted, kLivenessPeriod)) {
      // What the peer published before it ended still counts.
      if (has_ended(peer) || Clock::now() > end) return peer_progress.has_reached(wanted);
      if (has_failed()) return false;  // another thread found the cause
    }
    return true;
  }

  // Wait until every rank has published round `wanted` of the same collective; return false after a
  // failure.
  bool wait_for_all(uint32_t wanted, int64_t signature) {
    for (int64_t peer = 0; peer < size && !has_failed(); ++peer) {
      if (peer == rank) continue;
      if (!wait_for(peer, wanted)) {
        set_failure(static_cast<int32_t>(peer + 1));
      } else if (progress(peer).signatures[wanted & 1] != signature) {
        set_failure(-static_cast<int32_t>(peer + 1));
      }
    }
    return !has_failed();
  }

  void set_failure(int32_t reason) {
    int32_t none = 0;
    failure.compare_exchange_strong(none, reason);  // keep the first cause
  }
};

namespace {

// Run one collective in `num_parts` rounds: write(part, slot) copies this thread's share of a part
// into this rank's slot, and read(part, round) consumes its share of the slots of all ranks. After
// a failure the threads continue to the end without waiting, so that they leave together, but they
// neither write nor publish: a peer with a longer timeout would read data that was written too
// early.
template <typename Write, typename Read>
bool run_rounds(Communicator& communicator, int64_t signature, int64_t num_parts, ThreadTeam team,
                Write write, Read read) {
  // No thread may fail before all threads have seen that the previous collective succeeded.
  team.barrier();
  const uint32_t before = communicator.round;
  for (int64_t part = 0; part < num_parts; ++part) {
    const uint32_t round = before + 1 + static_cast<uint32_t>(part);
    if (!communicator.has_failed()) write(part, communicator.slot(communicator.rank, round));
    team.barrier();
    if (team.index == 0 && !communicator.has_failed()) {
      RankProgress& own = communicator.progress(communicator.rank);
      own.signatures[round & 1] = signature;
      own.publish(round);
    }
    if (communicator.wait_for_all(round, signature)) read(part, round);
  }
  team.barrier();
  if (team.index == 0) communicator.round = before + static_cast<uint32_t>(num_parts);
  return !communicator.has_failed();
}

// Conversions between the stored type and the type of the sum. Integers wrap around.
template <typename T>
struct Native {
  using Stored = T;
  using Sum = T;
  static Sum load(Stored value) { return value; }
  static Stored store(Sum sum) { return sum; }
};

struct Half {
  using Stored = StoredFloat16;
  using Sum = float;
  static Sum load(Stored value) { return static_cast<float>(value); }
  static Stored store(Sum sum) { return static_cast<StoredFloat16>(sum); }
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

  static Stored store(Sum sum) { return FormatTraits<Format::kBFloat16>::from_float(sum); }
};

// Sum elements `own` of one part over the slots of all ranks into `out`.
template <typename Type>
void sum_slots(const Communicator& communicator, uint32_t round, Range own,
               typename Type::Stored* out) {
  using Stored = typename Type::Stored;
  typename Type::Sum sums[kBlockElements];
  for (int64_t begin = own.begin; begin < own.end; begin += kBlockElements) {
    const int64_t count = std::min(kBlockElements, own.end - begin);
    for (int64_t rank = 0; rank < communicator.size; ++rank) {
      const Stored* peer_data =
          reinterpret_cast<const Stored*>(communicator.slot(rank, round)) + begin;
      for (int64_t i = 0; i < count; ++i) {
        const auto value = Type::load(peer_data[i]);
        sums[i] = rank == 0 ? value : static_cast<typename Type::Sum>(sums[i] + value);
      }
    }
    for (int64_t i = 0; i < count; ++i) out[begin + i] = Type::store(sums[i]);
  }
}

template <typename Type>
bool all_reduce_as(Communicator& communicator, void* data, int64_t count, int64_t type,
                   ThreadTeam team) {
  using Stored = typename Type::Stored;
  constexpr int64_t kPartElements = kSlotBytes / static_cast<int64_t>(sizeof(Stored));
  auto* values = static_cast<Stored*>(data);
  const auto length = [&](int64_t part) {
    return std::min(kPartElements, count - part * kPartElements);
  };
  const auto write = [&](int64_t part, char* slot) {
    const Range own = team.share(length(part));
    std::copy(values + part * kPartElements + own.begin, values + part * kPartElements + own.end,
              reinterpret_cast<Stored*>(slot) + own.begin);
  };
  const auto read = [&](int64_t part, uint32_t round) {
    sum_slots<Type>(communicator, round, team.share(length(part)), values + part * kPartElements);
  };
  const int64_t num_parts = (count + kPartElements - 1) / kPartElements;
  return run_rounds(communicator, type << 56 | count, num_parts, team, write, read);
}

// Copy the bytes `wanted` of every rank's own [bytes] to all [size, length of wanted].
bool gather_bytes(Communicator& communicator, int64_t signature, const char* own, int64_t bytes,
                  Range wanted, char* all, ThreadTeam team) {
  const auto write = [&](int64_t part, char* slot) {
    const int64_t begin = part * kSlotBytes;
    const Range share = team.share(std::min(kSlotBytes, bytes - begin));
    std::copy(own + begin + share.begin, own + begin + share.end, slot + share.begin);
  };
  const auto read = [&](int64_t part, uint32_t round) {
    const int64_t begin = std::max(part * kSlotBytes, wanted.begin);
    const int64_t end = std::min((part + 1) * kSlotBytes, wanted.end);
    const Range share = team.share(std::max<int64_t>(end - begin, 0));
    for (int64_t rank = 0; rank < communicator.size; ++rank) {
      const char* peer_data = communicator.slot(rank, round) + begin - part * kSlotBytes;
      std::copy(peer_data + share.begin, peer_data + share.end,
                all + rank * (wanted.end - wanted.begin) + begin - wanted.begin + share.begin);
    }
  };
  const int64_t num_parts = (bytes + kSlotBytes - 1) / kSlotBytes;
  return run_rounds(communicator, signature, num_parts, team, write, read);
}

// Element types, numbered as in shared_memory.py; 0 in a signature means all-gather.
enum ElementType : int32_t { kFloat32 = 1, kFloat64, kFloat16, kBFloat16, kInt32, kInt64 };
constexpr int64_t kAllToAll = 7;  // in a signature, in place of a type

bool all_reduce_typed(Communicator& communicator, int32_t type, void* data, int64_t count,
                      ThreadTeam team) {
  switch (type) {
    case kFloat32:
      return all_reduce_as<Native<float>>(communicator, data, count, type, team);
    case kFloat64:
      return all_reduce_as<Native<double>>(communicator, data, count, type, team);
    case kFloat16:
      return all_reduce_as<Half>(communicator, data, count, type, team);
    case kBFloat16:
      return all_reduce_as<BFloat16>(communicator, data, count, type, team);
    case kInt32:
      return all_reduce_as<Native<uint32_t>>(communicator, data, count, type, team);
    case kInt64:
      return all_reduce_as<Native<uint64_t>>(communicator, data, count, type, team);
  }
  __builtin_unreachable();
}

}  // namespace

bool all_reduce(Communicator* communicator, float* data, int64_t count, ThreadTeam team) {
  return all_reduce_typed(*communicator, kFloat32, data, count, team);
}

bool all_gather(Communicator* communicator, const void* own, int64_t bytes, void* all,
                ThreadTeam team) {
  return gather_bytes(*communicator, bytes, static_cast<const char*>(own), bytes, {0, bytes},
                      static_cast<char*>(all), team);
}

int64_t num_ranks(const Communicator* communicator) { return communicator->size; }

}  // namespace specdec

using specdec::Communicator;
using specdec::ThreadTeam;

SPECDEC_EXPORT int64_t specdec_region_bytes(int64_t size) { return specdec::region_bytes(size); }

// Map the region of `fd` (specdec_region_bytes zeros) and take this rank's lock in it. Takes
// ownership of `fd`: closing any other descriptor of the region in this process would release the
// lock. Return null when a system call fails; `fd` then still belongs to the caller.
SPECDEC_EXPORT Communicator* specdec_open_communicator(int32_t fd, int64_t rank, int64_t size,
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
  return new Communicator{fd, rank, size,
                          std::chrono::duration_cast<specdec::Clock::duration>(timeout),
                          static_cast<char*>(region)};
}

// Close the communicator; the peers see this rank as ended.
SPECDEC_EXPORT void specdec_close_communicator(Communicator* communicator) {
  munmap(communicator->region, specdec::region_bytes(communicator->size));
  close(communicator->fd);
  delete communicator;
}

// Return 0 without a failure, 1 + the lost rank, or -(1 + the rank that called another collective).
SPECDEC_EXPORT int32_t specdec_communicator_failure(const Communicator* communicator) {
  return communicator->failure;
}

// Sum data [count] over the ranks, in place, on up to `num_threads` threads; return the failure as
// above.
SPECDEC_EXPORT int32_t specdec_all_reduce(Communicator* communicator, int32_t type, void* data,
                                          int64_t count, int32_t num_threads) {
  specdec::run_parallel(specdec::threads_for(count * 4, num_threads), [&](ThreadTeam team) {
    specdec::all_reduce_typed(*communicator, type, data, count, team);
  });
  return communicator->failure;
}

// Copy part [bytes] of every rank to all [size, bytes]; return the failure as above.
SPECDEC_EXPORT int32_t specdec_all_gather(Communicator* communicator, const char* part,
                                          int64_t bytes, char* all, int32_t num_threads) {
  specdec::run_parallel(specdec::threads_for(bytes, num_threads), [&](ThreadTeam team) {
    specdec::all_gather(communicator, part, bytes, all, team);
  });
  return communicator->failure;
}

// Copy from parts [size, bytes] of every rank that of this rank to all [size, bytes]; return the
// failure as above.
SPECDEC_EXPORT int32_t specdec_all_to_all(Communicator* communicator, const char* parts,
                                          int64_t bytes, char* all, int32_t num_threads) {
  const int64_t total = communicator->size * bytes, begin = communicator->rank * bytes;
  specdec::run_parallel(specdec::threads_for(total, num_threads), [&](ThreadTeam team) {
    specdec::gather_bytes(*communicator, specdec::kAllToAll << 56 | total, parts, total,
                          {begin, begin + bytes}, all, team);
  });
  return communicator->failure;
}
