// The processor's widest vectors, as GCC vector extensions.
#pragma once

#include <cstdint>
#include <cstring>

// Before a loop over an array that must live in registers: only loops unrolled early can.
#define SPECDEC_UNROLL _Pragma("GCC unroll 16")

namespace specdec {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
constexpr int kNumRegisters = 32;
#elif defined(__AVX__)
constexpr int kVectorBytes = 32;
constexpr int kNumRegisters = 16;
#elif defined(__aarch64__)
constexpr int kVectorBytes = 16;
constexpr int kNumRegisters = 32;
#else
constexpr int kVectorBytes = 16;
constexpr int kNumRegisters = 16;
#endif

constexpr int kLanes = kVectorBytes / 4;  // lanes of 32 bits

using Floats = float __attribute__((vector_size(kVectorBytes)));
using Ints = int32_t __attribute__((vector_size(kVectorBytes)));
using Bits = uint32_t __attribute__((vector_size(kVectorBytes)));
using Halves = uint16_t __attribute__((vector_size(kVectorBytes / 2)));  // kLanes values of 16 bits

template <class Vector>
inline Vector load(const void* memory) {
  Vector value;
  std::memcpy(&value, memory, sizeof(value));
  return value;
}

template <class Vector>
inline void store(void* memory, Vector value) {
  std::memcpy(memory, &value, sizeof(value));
}

// GCC folds a load into each instruction that uses the vector, so that it is loaded once per use,
// or loads ahead of its use until the 16 registers of AVX do not suffice. These functions prevent
// that; elsewhere they do nothing.

// Have a vector in a register at this point.
template <class Vector>
inline void pin_register([[maybe_unused]] Vector& value) {
#if defined(__AVX__) && !defined(__AVX512F__)
  asm("" : "+x"(value));
#endif
}

// Have a sum in a register at this point, and not in that of a factor, so that it does not move.
template <class Vector>
inline void pin_sum([[maybe_unused]] Vector& sum, [[maybe_unused]] Vector factor,
                    [[maybe_unused]] Vector other_factor) {
#if defined(__AVX__) && !defined(__AVX512F__)
  asm("" : "+x"(sum) : "x"(factor), "x"(other_factor));
#endif
}

// Load through this pointer after this point, also what has been loaded before.
template <class Pointer>
inline void load_again([[maybe_unused]] Pointer& source) {
#if defined(__AVX__) && !defined(__AVX512F__)
  asm volatile("" : "+r"(source));
#endif
}

}  // namespace specdec
