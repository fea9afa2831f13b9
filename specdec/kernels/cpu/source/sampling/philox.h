// Philox4x32-10 (Salmon, Moraes, Dror and Shaw 2011), equal to `specdec/sampling/gumbel.py`.
#pragma once

#include <cstdint>

namespace specdec::sampling {

struct Words {
  uint32_t w0, w1, w2, w3;
};

inline Words philox4x32(Words counter, uint64_t key) {
  uint32_t key0 = static_cast<uint32_t>(key), key1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = uint64_t{0xD2511F53} * counter.w0;
    const uint64_t product1 = uint64_t{0xCD9E8D57} * counter.w2;
    counter = {
        static_cast<uint32_t>(product1 >> 32) ^ counter.w1 ^ key0, static_cast<uint32_t>(product1),
        static_cast<uint32_t>(product0 >> 32) ^ counter.w3 ^ key1, static_cast<uint32_t>(product0)};
    key0 += 0x9E3779B9;
    key1 += 0xBB67AE85;
  }
  return counter;
}

}  // namespace specdec::sampling
