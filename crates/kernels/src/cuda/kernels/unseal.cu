// Sealed pages to bf16 pages in shared memory, by THREADS threads that work on nothing else meanwhile. A bf16 page is made of
// squares of eight rows and sixteen bytes (`page_order.rs`): a row of keys is a token and eight of its channels, a row of values
// is a channel of eight tokens. A thread has one token of keys and 16 bytes at a time, and eight tokens of values.

// Two numbers as bf16, the first in the low half.
DEVICE u32 two_halves(float low, float high) {
  u32 word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}

#if SEALED_BITS
// How many sixteen bytes a thread has in hand at once; threads that also hold sums have registers for few.
template <int THREADS>
constexpr int AT_ONCE = THREADS == 128 ? 2 : 1;
constexpr int SEALED_PAGE_BYTES = PAGE_TOKENS / SEALED_TILE_TOKENS * SEALED_TILE_BYTES;
constexpr int TILE_TOKENS = SEALED_TILE_TOKENS;

// Where the sixteen bytes of eight channels of a key lie in a bf16 page, and those of eight tokens of a value.
DEVICE int key_square(int token, int channel) { return token / 8 * EXACT_TILE_BYTES + channel / 8 * 128 + token % 8 * 16; }
DEVICE int value_square(int eight_tokens, int channel) {
  return eight_tokens * EXACT_TILE_BYTES + EXACT_SIDE_BYTES + channel * 16;
}
#endif

#if SEALED_BITS == 2 || SEALED_BITS == 4
// A code in a byte of a word as a float that is 128 too large: the byte becomes a part of the mantissa.
constexpr float OFFSET = 128.0f;
DEVICE float code_and_128(u32 codes, int byte) {
  return __uint_as_float(__byte_perm(codes, 0x43000000u, 0x7044 | byte << 8));
}
// `scale * code + bias` of four codes, the first in the lowest byte, where `bias` makes up for the 128.
DEVICE uint2 four_numbers(u32 codes, float scale, float bias) {
  return make_uint2(
      two_halves(fmaf(scale, code_and_128(codes, 0), bias), fmaf(scale, code_and_128(codes, 1), bias)),
      two_halves(fmaf(scale, code_and_128(codes, 2), bias), fmaf(scale, code_and_128(codes, 3), bias)));
}

// Where a token of a page has its codes and scales.
struct SealedToken {
  const u8 *tile, *scales;  // scales of keys; those of values follow
  int run_token, column, eight, row;
  DEVICE SealedToken(const u8* page, int token) {
    constexpr int run = TILE_TOKENS / 4;
    tile = page + token / TILE_TOKENS * SEALED_TILE_BYTES;
    run_token = token % run, column = token % TILE_TOKENS / run;
    eight = run_token / 4 * 2 + run_token % 2, row = 2 * column + run_token % 4 / 2;
    scales = tile + SEALED_KEY_BYTES + SEALED_VALUE_BYTES + token_scale(eight, row);
  }
  DEVICE float2 scale(int side, int group) const {
    return scale_pair(*(const u32*)(scales + side * SEALED_SCALE_BYTES + group * TILE_TOKENS * 4));
  }
};

DEVICE int code_shift(int half, int part) { return SEALED_BITS == 4 ? 4 * part : 2 * (half + 2 * part); }
constexpr u32 CODES = ((1u << SEALED_BITS) - 1) * 0x01010101u;

#if BAND_UNITS
// Eight channels of the mean key of a page, in bf16, or zeros if there is none.
DEVICE uint4 eight_of_mean(const u8* mean, int channel) {
  return mean ? *(const uint4*)(mean + channel * 2) : make_uint4(0, 0, 0, 0);
}
// Two numbers and a pair of bf16 as a pair of bf16.
DEVICE u32 sum_of_halves(float low, float high, u32 pair) {
  return two_halves(low + __uint_as_float(pair << 16), high + __uint_as_float(pair & 0xffff0000u));
}
// The same of four numbers as `four_numbers`.
DEVICE uint2 four_sums(u32 codes, float scale, float bias, u32 first, u32 second) {
  return make_uint2(
      sum_of_halves(fmaf(scale, code_and_128(codes, 0), bias), fmaf(scale, code_and_128(codes, 1), bias), first),
      sum_of_halves(fmaf(scale, code_and_128(codes, 2), bias), fmaf(scale, code_and_128(codes, 3), bias), second));
}

// Keys in bands. Of each sixteen channels a thread has the first or the second eight. Channels after the last band are zero.
// Keys are less `mean`, where that is not null.
template <int THREADS>
DEVICE void unseal_keys(const u8* page, const u8* mean, u8* out, int thread) {
  constexpr int SHARES = THREADS / 128, UNITS = HEAD_DIM / 16, STORED_UNITS = band_unit(3) + band_units(3);
  // Bits of a token need not begin at a byte.
  constexpr bool ALIGNED = TOKEN_BITS % 8 == 0;
  constexpr int WORDS = (TOKEN_BITS + 7 + (ALIGNED ? 0 : 4)) / 8;
  const int token = thread % PAGE_TOKENS, half = thread / PAGE_TOKENS % 2;
  const SealedToken place(page, token);
  const int first = place.eight * TOKEN_BITS;
  u32 words[2][WORDS];
  #pragma unroll
  for (int i = 0; i < WORDS && !UNITS_TOGETHER; i++) {
    const int word = first / 8 + i;
    #pragma unroll
    for (int j = 0; j < 2; j++)
      words[j][i] = *(const u32*)(place.tile + key_word(word, place.row * 4 + 2 * half + j));
  }
  const u32 stored = *(const u32*)place.scales;
  float scales[BANDS], biases[BANDS];
  #pragma unroll
  for (int band = 0; band < BANDS; band++) {
    const u32 code = stored >> 8 * band & 255;
    scales[band] = code == 0 ? 0.0f : exp2_fast(code * (1.0f / 16.0f) - OCTAVES_BELOW);
    biases[band] = -scales[band] * (OFFSET + 0.5f * (float)((1 << band_bits(band)) - 1));
  }
  #pragma unroll
  for (int unit = 0; unit < UNITS; unit++) {
    if (SHARES > 1 && unit % SHARES != thread / 128) continue;
    uint4* target = (uint4*)(out + key_square(token, unit * 16 + half * 8));
    const uint4 more = eight_of_mean(mean, unit * 16 + half * 8);
    if (unit >= STORED_UNITS) {
      *target = more;
      continue;
    }
    int band = 0;
    #pragma unroll
    for (int i = 1; i < BANDS; i++) band += unit >= band_unit(i);
    const int bits = band_bits(band), bit = band_bit(band) + (unit - band_unit(band)) * bits;
    const int flat = key_bit(place.eight, bit, bits), shift = ALIGNED ? bit % 8 : flat % 8;
    const bool later = !ALIGNED && bit % 8 + first % 8 >= 8;
    const u32 mask = ((1u << bits) - 1) * 0x01010101u;
    uint2 eight[2];
    #pragma unroll
    for (int j = 0; j < 2; j++) {
      const u32 word = UNITS_TOGETHER ? *(const u32*)(place.tile + key_word(flat / 8, place.row * 4 + 2 * half + j))
          : later ? words[j][min(bit / 8 + 1, WORDS - 1)] : words[j][bit / 8];
      eight[j] = four_sums(word >> shift & mask, scales[band], biases[band], word_of(more, 2 * j), word_of(more, 2 * j + 1));
    }
    *target = make_uint4(eight[0].x, eight[0].y, eight[1].x, eight[1].y);
  }
}
#else
template <int THREADS>
DEVICE void unseal_keys(const u8* page, const u8*, u8* out, int thread) {
  constexpr int SHARES = THREADS / PAGE_TOKENS, CHUNKS = HEAD_DIM / 32;
  const int token = thread % PAGE_TOKENS;
  const SealedToken place(page, token);
  #pragma unroll (AT_ONCE<THREADS>)
  for (int channel = thread / PAGE_TOKENS * 8; channel < HEAD_DIM; channel += SHARES * 8) {
    const float2 scale = place.scale(0, channel / (HEAD_DIM / GROUPS));
    const float bias = -fmaf(scale.x, OFFSET, scale.y);
    const int flat = place.eight * CHUNKS + channel / 32, inner = channel % 32;
    const int word = flat * SEALED_BITS / 4, shift = code_shift(flat % (4 / SEALED_BITS), inner / 16);
    const u8* at = place.tile + lane_word(word, place.row * 4 + inner % 16 / 4);
    const uint2 first = four_numbers(*(const u32*)at >> shift & CODES, scale.x, bias);
    const uint2 second = four_numbers(*(const u32*)(at + 16) >> shift & CODES, scale.x, bias);
    *(uint4*)(out + key_square(token, channel)) = make_uint4(first.x, first.y, second.x, second.y);
  }
}
#endif

template <int THREADS>
DEVICE void unseal_values(const u8* page, u8* out, int thread) {
  constexpr int NEIGHBOURS = THREADS / 8;
  // Eight tokens side by side are in one run, so that their codes of a channel are in one word.
  const int eight_tokens = thread / NEIGHBOURS;
  const SealedToken first(page, eight_tokens * 8);
  #pragma unroll 1
  for (int group = 0; group < GROUPS; group++) {
    float scales[8], biases[8];
    #pragma unroll
    for (int i = 0; i < 8; i++) {
      const float2 scale = SealedToken(page, eight_tokens * 8 + i).scale(1, group);
      scales[i] = scale.x, biases[i] = -fmaf(scale.x, OFFSET, scale.y);
    }
    constexpr int CHANNELS = HEAD_DIM / GROUPS;
    #pragma unroll (AT_ONCE<THREADS>)
    for (int i = thread % NEIGHBOURS; i < CHANNELS; i += NEIGHBOURS) {
      const int channel = group * CHANNELS + i, eight = channel / 8;
      const int word = eight * SEALED_BITS / 4 * (TILE_TOKENS / 32) + first.run_token / 8;
      const int half = eight % (4 / SEALED_BITS);
      const u32 codes = *(const u32*)(first.tile + SEALED_KEY_BYTES
          + lane_word(word, channel % 8 * 4 + first.column));
      u32 pairs[4];
      #pragma unroll
      for (int j = 0; j < 4; j++) {
        const u32 four = codes >> code_shift(half, j / 2) & CODES;
        const int a = 2 * j, b = a + 1;
        pairs[j] = two_halves(
            fmaf(scales[a], code_and_128(four, a % 4), biases[a]), fmaf(scales[b], code_and_128(four, b % 4), biases[b]));
      }
      *(uint4*)(out + value_square(eight_tokens, channel)) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    }
  }
}
#endif

#if SEALED_BITS == 8
// A number of E4M3, widened to f16 with a shift, which makes it 2^8 times too small.
DEVICE float wide(u32 byte) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"((u16)((byte & 0x7fu) << 7 | (byte & 0x80u) << 8)));
  return x * 256.0f;
}
DEVICE float stored_scale(const u8* page, int side, int token) {
  const u8* scales = page + token / 16 * SEALED_TILE_BYTES + SEALED_KEY_BYTES + SEALED_VALUE_BYTES + side * SEALED_SCALE_BYTES;
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(*(const u16*)(scales + token % 16 * 2)));
  return x;
}

template <int THREADS>
DEVICE void unseal_keys(const u8* page, const u8*, u8* out, int thread) {
  const int token = thread % PAGE_TOKENS;
  const float scale = stored_scale(page, 0, token);
  #pragma unroll (AT_ONCE<THREADS>)
  for (int channel = thread / PAGE_TOKENS * 8; channel < HEAD_DIM; channel += THREADS / PAGE_TOKENS * 8) {
    const int word = token % 16 / 8 * (HEAD_DIM / 16) + channel / 16;
    const u8* at = page + token / 16 * SEALED_TILE_BYTES + lane_word(word, token % 8 * 4 + channel % 16 / 4);
    u32 pairs[4];
    #pragma unroll
    for (int i = 0; i < 4; i++) {
      const u32 two = *(const u32*)(at + i / 2 * 16) >> 16 * (i % 2);
      pairs[i] = two_halves(scale * wide(two & 255), scale * wide(two >> 8 & 255));
    }
    *(uint4*)(out + key_square(token, channel)) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
  }
}

template <int THREADS>
DEVICE void unseal_values(const u8* page, u8* out, int thread) {
  constexpr int NEIGHBOURS = THREADS / 8;
  const int eight_tokens = thread / NEIGHBOURS;
  float scales[8];
  #pragma unroll
  for (int i = 0; i < 8; i++) scales[i] = stored_scale(page, 1, eight_tokens * 8 + i);
  #pragma unroll (AT_ONCE<THREADS>)
  for (int channel = thread % NEIGHBOURS; channel < HEAD_DIM; channel += NEIGHBOURS) {
    const int word = channel / 8;
    const u8* at = page + eight_tokens / 2 * SEALED_TILE_BYTES + SEALED_KEY_BYTES
        + lane_word(word, channel % 8 * 4);
    u32 pairs[4];
    #pragma unroll
    for (int i = 0; i < 4; i++) {
      const u32 two = *(const u32*)(at + i * 16) >> 8 * (eight_tokens % 2);
      pairs[i] = two_halves(scales[2 * i] * wide(two & 255), scales[2 * i + 1] * wide(two >> 16 & 255));
    }
    *(uint4*)(out + value_square(eight_tokens, channel)) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
  }
}
#endif

#if SEALED_BITS
template <int THREADS>
DEVICE void unseal(const u8* page, const u8* mean, u8* out, int thread) {
  unseal_keys<THREADS>(page, mean, out, thread);
  unseal_values<THREADS>(page, out, thread);
}
#endif
