// Sealing: full bf16 pages to codes or 8-bit floats, for all layers and heads of all pages that are due, in one launch.
// A block seals one page of one head. The page comes into shared memory; then every thread has one row, a key or a value
// of one token, and repeats `oscar_codec::quantise` on it in the order that is defined there (`seal_bands.cu`: `band`, for
// keys in bands). The sealed page is put together in shared memory and leaves as a whole.

// What becomes of the pages of a layer; otherwise they are encoded.
constexpr u32 COPIED = 0, NO_HISTORY = 2;
// How a grid is chosen. RULES has a bit for each that a codec uses.
constexpr int MIN_MAX = 0, CLIP = 1, GAUSSIAN = 2, SEARCH = 3;
constexpr int SEARCH_COUNT = 7;
constexpr float TOP = (float)((1 << (BITS & 7)) - 1);
constexpr float SMALLEST_RANGE = 1e-8f;
// A row is stretched only by a factor between these.
constexpr float SMALLEST_GAIN = 0.5f, LARGEST_GAIN = 2.0f;

struct SealedPage {
  u32 from, to, number;  // slots; the number in its sequence
};
struct SealedLayer {
  u32 begin, kind;  // first byte in a sealed slot; what becomes of pages
  u32 place;        // among the layers whose pages are centred, or all ones
};

struct Arguments {
  const u8* exact;      // [slot][layer][head] bf16 pages
  const u8* scratch;    // [slot - exact_slots][head]: slots that hold one layer
  u8* sealed;           // [slot], each `sealed_stride` bytes
  const SealedPage* pages;
  const SealedLayer* layers;
  const u32* rules;     // [layer][head][key, value]: rule, and from bit 8 on the rank of the magnitude to clip at
  u64* failure;         // place of the first number that is not finite, all ones if there is none
  const u8* means;      // [place][page][head]: mean keys in bf16, as rows are stored
  long long sealed_stride;
  int exact_slots, all_layers, first_layer, layers_here, kv_heads;
  int mean_pages;       // that a layer has means of
};

DEVICE u32 largest_magnitude(const Row& row) {
  u32 most = 0;
  for_words<4>(row, 0, CHUNKS, [&](u32 word) { most = max_halves(most, word & 0x7fff7fffu); });
  return max(most & 0xffffu, most >> 16);
}

// Magnitudes of a row that are not below `bits`.
DEVICE int count_from(const Row& row, u32 bits) {
  const u32 both = bits * 0x10001u;
  u32 sum = 0;
#if __CUDA_ARCH__ >= 900 && !PORTABLE
  // Counts up to 256 are exact in bf16.
  for_words<4>(row, 0, CHUNKS, [&](u32 word) {
    u32 one;
    asm("set.ge.bf16x2.bf16x2 %0, %1, %2;" : "=r"(one) : "r"(word & 0x7fff7fffu), "r"(both));
    asm("add.rn.bf16x2 %0, %1, %2;" : "=r"(sum) : "r"(sum), "r"(one));
  });
  return (int)low_half(sum) + (int)high_half(sum);
#else
  // The sign bit of each half survives a subtraction of what is not larger.
  for_words<4>(row, 0, CHUNKS, [&](u32 word) { sum += ((word | 0x80008000u) - both) >> 15 & 0x10001u; });
  return (sum & 0xffffu) + (sum >> 16);
#endif
}

// The magnitude of the given rank, the largest having rank 1: at least so many are not below `low`, fewer not below `high`.
// Most rows have it within a factor of two of the largest, so that is where the search begins.
DEVICE float clip_threshold(const Row& row, int rank) {
  u32 low = 0, high = largest_magnitude(row) + 1, reach = 128;
  while (low + 1 < high) {
    u32 middle = (low + high) >> 1;
    if (low == 0 && high > reach) middle = high - reach;
    reach *= 2;
    if (count_from(row, middle) >= rank) low = middle;
    else high = middle;
  }
  return __uint_as_float(low << 16);
}

#if SCALE_BF16
constexpr u32 LARGEST = (122 + 127) << 23, SMALLEST = 1 << 23;
DEVICE u32 scale_bits(float x) { return bf16_bits(x); }
DEVICE float scale_value(u32 bits) { return __uint_as_float(bits << 16); }
#else
constexpr u32 LARGEST = 0x477fe000u, SMALLEST = (127 - 24) << 23;  // 65504, 2^-24
DEVICE u32 scale_bits(float x) {
  u16 bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
}
DEVICE float scale_value(u32 bits) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"((u16)bits));
  return x;
}
#endif
// As `ScaleType::to_bits`: saturating, NaN becomes the most negative.
DEVICE u32 stored_bits(float x) {
  const float limit = __uint_as_float(LARGEST);
  return scale_bits(fminf(fmaxf(x, -limit), limit));
}

// A grid as a reader sees it, and what codes are chosen with.
struct Grid {
  float scale, offset;
  float factor, shift;  // 1 / scale, unused; published: step, offset / step before rounding
  float mean, squares;  // of the channels, where the rule has them

  DEVICE u32 choose(float step, float low) {
    const float before = 0.0f - low;
    const u32 s = stored_bits(fmaxf(step, PUBLISHED ? 0.0f : __uint_as_float(SMALLEST))), o = stored_bits(before);
    scale = scale_value(s);
    offset = scale_value(o);
    factor = PUBLISHED ? step : 1.0f / scale;
    shift = PUBLISHED ? before / step : 0.0f;
    return s | o << 16;
  }
  // The code, plus 2^23: rounding toward zero there drops what is behind the point, and the lowest byte is the code.
  DEVICE float code_above(float x) const {
    const float c = PUBLISHED ? x / factor + shift + 0.5f : __fmaf_rn(x + offset, factor, 0.5f);
    return __fadd_rz(fminf(fmaxf(c, 0.0f), TOP), 8388608.0f);
  }
  DEVICE float decode(float above) const { return __fmaf_rn(above - 8388608.0f, scale, -offset); }
  DEVICE float squared_error(float x, float sum) const {
    const float error = decode(code_above(x)) - x;
    return __fmaf_rn(error, error, sum);
  }
  // What is stored of a grid around a mean, given the product of a row and what its codes decode to.
  DEVICE u32 unbiased(float along) const {
    float gain = squares / along;
    if (!(gain > SMALLEST_GAIN && gain < LARGEST_GAIN)) gain = 1.0f;
    const u32 s = stored_bits(fmaxf(gain * scale, __uint_as_float(SMALLEST)));
    return s | stored_bits(__fmaf_rn(gain, offset, (gain - 1.0f) * mean)) << 16;
  }
};

#if BITS == 2 || BITS == 4
__constant__ u32 search_steps[SEARCH_COUNT] = {STEP_0, STEP_1, STEP_2, STEP_3, STEP_4, STEP_5, STEP_6};

// Mean and deviation of a group of channels, and grids around them.
struct Moments {
  float mean, squares, deviation;

  DEVICE Moments(const Row& row, int begin, int end) {
    constexpr float count = (float)(GROUP_CHUNKS * 32);
    float sum = 0.0f;
    for_values<4>(row, begin, end, [&](float x) { sum += x; });
    mean = sum / count;
    squares = 0.0f;
    for_values<4>(row, begin, end, [&](float x) { squares = __fmaf_rn(x - mean, x - mean, squares); });
    deviation = __fsqrt_rn(squares / count) + SMALLEST_RANGE;
  }
  DEVICE u32 choose(u32 step_bits, Grid& grid) const {
    const float step = __uint_as_float(step_bits) * deviation;
    grid.mean = mean;
    grid.squares = squares;
    return grid.choose(step, mean - 0.5f * TOP * step);
  }
};

// The steps, as bits, that can be the best: all but those whose error is larger than the least for certain. The distance of
// x to the nearest of four levels around a centre is ||x - centre| - scale| - scale / 2, four instructions instead of the
// nine that are defined. Let u be 2^-24. Its four roundings are at most u (3 |x| + 4 |offset| + 9 scale), the two of what is
// defined u (|x| + 2 |offset| + 6 scale), and a code that is not the nearest, since it was rounded three times, adds 24 u
// scale. So in every channel the two differ by less than 2^-22 (|x| + 1.5 |offset| + 10 scale), the roots of the sums of
// squares by less than the norm of that over all channels, and by 2^-17 of themselves for the roundings of the sums of up to
// 256 squares. Where numbers are so small or so large that this does not hold, or the rules are others, every step stays.
DEVICE u32 contenders(const Row& row, const Moments& moments, int begin, int end) {
  constexpr u32 all = (1 << SEARCH_COUNT) - 1;
  if (BITS != 2 || PUBLISHED) return all;
  float centres[SEARCH_COUNT], scales[SEARCH_COUNT], halves[SEARCH_COUNT], sums[SEARCH_COUNT];
  float largest = 0.0f;
  #pragma unroll
  for (int i = 0; i < SEARCH_COUNT; i++) {
    Grid grid;
    moments.choose(search_steps[i], grid);
    centres[i] = __fmaf_rn(1.5f, grid.scale, -grid.offset);
    scales[i] = grid.scale;
    halves[i] = 0.5f * grid.scale;
    sums[i] = 0.0f;
    largest = fmaxf(largest, 1.5f * fabsf(grid.offset) + 10.0f * grid.scale);
  }
  for_values<1>(row, begin, end, [&](float x) {
    #pragma unroll
    for (int i = 0; i < SEARCH_COUNT; i++) {
      const float error = fabsf(fabsf(x - centres[i]) - scales[i]) - halves[i];
      sums[i] = __fmaf_rn(error, error, sums[i]);
    }
  });
  float least = sums[0];
  #pragma unroll
  for (int i = 1; i < SEARCH_COUNT; i++) least = fminf(least, sums[i]);
  const float root = __fsqrt_rn((float)(GROUP_CHUNKS * 32));
  const float difference = 2.3841858e-7f * (root * (fabsf(moments.mean) + largest) + __fsqrt_rn(moments.squares));
  // 1 + 2^-15 for the sums of both, and a little for the roundings of this.
  const float limit = __fsqrt_rn(least) * 1.000032f + 2.01f * difference;
  u32 kept = 0;
  #pragma unroll
  for (int i = 0; i < SEARCH_COUNT; i++)
    // Not a number is not larger: such a step stays.
    if (!(sums[i] > limit * limit) || least < 1e-30f) kept |= 1 << i;
  return kept;
}

// The grid of a group of channels and its stored bits.
DEVICE u32 group_grid(const Row& row, int rule, float threshold, int begin, int end, Grid& grid) {
  if ((RULES & 3) && rule <= CLIP) {
    u32 least = row.unit(begin, 0).x, most = least;
    for_words<4>(row, begin, end, [&](u32 word) {
      least = min_halves(least, word);
      most = max_halves(most, word);
    });
    float low = fminf(low_half(least), high_half(least)), high = fmaxf(low_half(most), high_half(most));
    // Clipping keeps order, so the least of the clipped is the clipped least.
    low = fminf(fmaxf(low, -threshold), threshold);
    high = fminf(fmaxf(high, -threshold), threshold);
    return grid.choose(fmaxf(high - low, SMALLEST_RANGE) / TOP, low);
  }
  if (RULES & 12) {
    const Moments moments(row, begin, end);
    if (!(RULES & 8) || rule == GAUSSIAN) return moments.choose(GAUSSIAN_STEP, grid);
    const u32 kept = contenders(row, moments, begin, end);
    int best = __ffs(kept) - 1;
    if (kept & (kept - 1)) {
      float least;
      #pragma unroll 1
      for (int i = best; i < SEARCH_COUNT; i++) {
        if (!(kept >> i & 1)) continue;
        Grid trial;
        moments.choose(search_steps[i], trial);
        float error = 0.0f;
        for_values<2>(row, begin, end, [&](float x) { error = trial.squared_error(x, error); });
        // The first of equals wins.
        if (i == best || error < least) {
          least = error;
          best = i;
        }
      }
    }
    return moments.choose(search_steps[best], grid);
  }
  return 0;
}

// Puts the codes of a chunk of a key, four to a word, into its page. `held` keeps words that are not full yet.
DEVICE void put_key(u8* page, const LaneToken& at, int chunk, const u32 (&quads)[8], u32 (&held)[4]) {
  const int flat = at.eight * CHUNKS + chunk, word = flat * BITS / 4;
  u8* tile = page + at.tile * TILE_BYTES;
  #pragma unroll
  for (int lane = 0; lane < 4; lane++) {
    u32* out = (u32*)(tile + lane_word(word, at.row * 4 + lane));
    const u32 codes = quads[lane] | quads[lane + 4] << 4;
    if (BITS == 4) *out = codes;
    else if (SHARED_WORDS) atomicOr(out, codes << 2 * (flat % 2));
    else if (chunk % 2) *out = held[lane] | codes << 2;
    else held[lane] = codes;
  }
}

// The same for a value. A byte holds tokens t and t + 4: their threads exchange what the other one is to write.
DEVICE void put_value(u8* page, const LaneToken& at, int chunk, const u32 (&quads)[8]) {
  constexpr int COUNT = BITS;  // quads of a pair of threads, each with half of them
  u32 whole[2 * COUNT];
  #pragma unroll
  for (int i = 0; i < 2 * COUNT; i++)
    whole[i] = BITS == 4 ? quads[i] : quads[i / 2 * 4 + i % 2] | quads[i / 2 * 4 + 2 + i % 2] << 2;
  const int part = at.token % 8 / 4;
  u8* values = page + at.tile * TILE_BYTES + KEY_BYTES;
  #pragma unroll
  for (int i = 0; i < COUNT; i++) {
    const u32 mine = part ? whole[COUNT + i] : whole[i];
    const u32 other = __shfl_xor_sync(ALL_LANES, part ? whole[i] : whole[COUNT + i], 4);
    const u32 bytes = part ? other | mine << 4 : mine | other << 4;
    const int quad = part * COUNT + i;
    const int word = BITS == 4 ? quad / 2 : quad / 2 * 2 + at.token / 8;
    #pragma unroll
    for (int byte = 0; byte < 4; byte++)
      values[lane_word(chunk * 4 + word, (quad % 2 * 4 + byte) * 4 + at.column) + at.token % 4] = (u8)(bytes >> 8 * byte);
  }
}

DEVICE void seal_row(const Row& row, const uint4* mean, u32 rule, int side, int token, u8* page) {
#if BAND_UNITS
  if (side == 0) return seal_key({row, mean}, token, page);
#endif
  const int kind = rule & 255;
  float threshold = __int_as_float(0x7f800000);
  if ((RULES & 2) && kind == CLIP) threshold = clip_threshold(row, rule >> 8);
  const LaneToken at(token);
  u32 held[4];
  #pragma unroll 1
  for (int group = 0; group < GROUPS; group++) {
    Grid grid;
    const int begin = group * GROUP_CHUNKS;
    u32 bits = group_grid(row, kind, threshold, begin, begin + GROUP_CHUNKS, grid);
    const bool corrected = (RULES & 12) && !PUBLISHED && kind >= GAUSSIAN;
    float along = 0.0f;
    #pragma unroll 1
    for (int chunk = begin; chunk < begin + GROUP_CHUNKS; chunk++) {
      u32 quads[8];
      #pragma unroll
      for (int part = 0; part < 4; part++) {
        const uint4 unit = row.unit(chunk, part);
        float c[8] = {low_half(unit.x), high_half(unit.x), low_half(unit.y), high_half(unit.y),
                      low_half(unit.z), high_half(unit.z), low_half(unit.w), high_half(unit.w)};
        #pragma unroll
        for (int i = 0; i < 8; i++) {
          if (RULES & 2) c[i] = fminf(fmaxf(c[i], -threshold), threshold);
          const float x = c[i];
          c[i] = grid.code_above(x);
          if (corrected) along = __fmaf_rn(x - grid.mean, grid.decode(c[i]) - grid.mean, along);
        }
        quads[2 * part] = four_bytes(c[0], c[1], c[2], c[3]);
        quads[2 * part + 1] = four_bytes(c[4], c[5], c[6], c[7]);
      }
      if (!BAND_UNITS && side == 0) put_key(page, at, chunk, quads, held);
      else put_value(page, at, chunk, quads);
    }
    if (corrected) bits = grid.unbiased(along);
    *(u32*)(page + at.tile * TILE_BYTES + SCALES_AT + side * SIDE_SCALE_BYTES + group * TILE_TOKENS * 4
            + token_scale(at.eight, at.row)) = bits;
  }
}
#elif BITS == 8
// As `oscar_codec::fp8`: nearest, ties to even, saturating. The lower byte is `x`.
DEVICE u32 two_e4m3(float x, float y) {
#if __CUDA_ARCH__ >= 890 && !PORTABLE
  u16 bits;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(bits) : "f"(y), "f"(x));
  return bits;
#else
  u32 both = 0;
  #pragma unroll
  for (int i = 0; i < 2; i++) {
    const u32 all = __float_as_uint(i ? y : x), bits = min(all & 0x7fffffffu, 0x43e00000u);
    // Below 2^-6 neighbours are 2^-9 apart, as numbers next to 2^14 are. Above, half a step is added, less one bit where
    // the kept part is even, and the exponent's bias goes from 127 to 7.
    const u32 subnormal = __float_as_uint(__uint_as_float(bits) + 16384.0f) & 0xff;
    const u32 normal = ((bits + 0x7ffff + (bits >> 20 & 1)) >> 20) - (120 << 3);
    both |= ((all >> 24 & 0x80) | (bits < 0x3c800000u ? subnormal : normal)) << 8 * i;
  }
  return both;
#endif
}

DEVICE void seal_row(const Row& row, const uint4*, u32, int side, int token, u8* page) {
  const float largest = __uint_as_float(largest_magnitude(row) << 16);
  const u32 bits = stored_bits(fmaxf(largest / 448.0f, __uint_as_float(SMALLEST)));
  const float scale = scale_value(bits);
  page += token / 16 * TILE_BYTES;
  token %= 16;
  *(u16*)(page + SCALES_AT + side * SIDE_SCALE_BYTES + token * 2) = (u16)bits;
  #pragma unroll 4
  for (int i = 0; i < CHUNKS * 4; i++) {
    const uint4 unit = row.unit(i >> 2, i & 3);
    const u32 words[4] = {unit.x, unit.y, unit.z, unit.w};
    u32 quads[2];
    #pragma unroll
    for (int j = 0; j < 2; j++) {
      const u32 a = words[2 * j], b = words[2 * j + 1];
      quads[j] = two_e4m3(low_half(a) / scale, high_half(a) / scale)
          | two_e4m3(low_half(b) / scale, high_half(b) / scale) << 16;
      if (side == 0) {
        const int word = token / 8 * (HEAD_DIM / 16) + i / 2;
        *(u32*)(page + lane_word(word, token % 8 * 4 + i % 2 * 2 + j)) = quads[j];
      } else {
        u8* values = page + KEY_BYTES + token % 2 * 2 + token / 8;
        #pragma unroll
        for (int byte = 0; byte < 4; byte++)
          values[lane_word(i, (j * 4 + byte) * 4 + token % 8 / 2)] = (u8)(quads[j] >> 8 * byte);
      }
    }
  }
}
#else
DEVICE void seal_row(const Row&, const uint4*, u32, int, int, u8*) {}
#endif

// Squares of eight channels and eight tokens of values are transposed where they lie, so that rows are those of tokens. A warp
// does the four tiles whose tokens it has, four squares at a time.
DEVICE void transpose_values(uint4* page, int token) {
  const int lane = token & 31;
  #pragma unroll 1
  for (int tile = token >> 5 << 2; tile < (token >> 5 << 2) + 4; tile++) {
    #pragma unroll
    for (int chunk = 0; chunk < CHUNKS; chunk++) {
      uint4* squares = page + tile * TILE_UNITS + SIDE_UNITS + chunk * 32;
      u32 words[4];
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
          : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3]) : "r"(shared_address(squares + lane)) : "memory");
      __syncwarp();
      #pragma unroll
      for (int i = 0; i < 4; i++) ((u32*)(squares + i * 8))[lane] = words[i];
    }
  }
  __syncwarp();
}

// The place of the first number of a row that is not finite; the page is as it came.
DEVICE u64 first_not_finite(const uint4* page, u64 block, int side, int token) {
  for (int channel = 0; channel < HEAD_DIM; channel++) {
    const int byte = side ? value_byte(token, channel) : key_byte(token, channel);
    const u16 bits = ((const u16*)page)[byte / 2];
    if ((bits & 0x7f80) == 0x7f80) return ((block * 2 + side) * PAGE_TOKENS + token) * HEAD_DIM + channel;
  }
  return ~0ull;
}

extern "C" __global__ void __launch_bounds__(THREADS) seal(Arguments a) {
  extern __shared__ uint4 memory[];
  u8* staged = (u8*)(memory + PAGE_UNITS);
  const int thread = threadIdx.x, side = thread / PAGE_TOKENS, token = thread % PAGE_TOKENS;
  const u32 block = blockIdx.x, head = block % a.kv_heads, rest = block / a.kv_heads;
  const int layer = a.first_layer + rest % a.layers_here;
  const SealedLayer described = a.layers[layer];
  if (described.kind == NO_HISTORY) return;
  const SealedPage page = a.pages[rest / a.layers_here];
  const long long page_bytes = PAGE_UNITS * 16;
  const u8* source = page.from < a.exact_slots
      ? a.exact + (((long long)page.from * a.all_layers + layer) * a.kv_heads + head) * page_bytes
      : a.scratch + ((long long)(page.from - a.exact_slots) * a.kv_heads + head) * page_bytes;
  for (int i = thread; i < PAGE_UNITS; i += THREADS) {
    const u32 target = shared_address(memory + i);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(target), "l"(source + 16 * i) : "memory");
  }
  const u32 rule = a.rules[(layer * a.kv_heads + head) * 2 + side];
  if (SHARED_WORDS)
    for (int i = thread; i < SEALED_BYTES / 16; i += THREADS) ((uint4*)staged)[i] = make_uint4(0, 0, 0, 0);
  asm volatile("cp.async.wait_all;" ::: "memory");
  u32 sum = 0;
  for (int i = thread; i < PAGE_UNITS; i += THREADS) {
    const uint4 unit = memory[i];
    sum = zero_times(unit.x, zero_times(unit.y, zero_times(unit.z, zero_times(unit.w, sum))));
  }
  // A page that cannot be sealed stays as it was.
  if (__syncthreads_or((sum & 0x7fff7fffu) != 0)) {
    const u64 found = first_not_finite(memory, block, side, token);
    if (found != ~0ull) atomicMin(a.failure, found);
    return;
  }
  u8* target = a.sealed + page.to * a.sealed_stride + described.begin;
  if (BITS == 16 || described.kind == COPIED) {
    target += head * page_bytes;
    for (int i = thread; i < PAGE_UNITS; i += THREADS) ((uint4*)target)[i] = memory[i];
    return;
  }
  if (side) transpose_values(memory, token);
  const Row row = {memory + (token >> 3) * TILE_UNITS + side * SIDE_UNITS + (token & 7)};
  const uint4* mean = nullptr;
  if (described.place != ~0u)
    mean = (const uint4*)(a.means + (((long long)described.place * a.mean_pages + page.number) * a.kv_heads + head) * (HEAD_DIM * 2));
  seal_row(row, mean, rule, side, token, staged);
  __syncthreads();
  target += head * (long long)SEALED_BYTES;
  for (int i = thread; i < SEALED_BYTES / 16; i += THREADS) ((uint4*)target)[i] = ((uint4*)staged)[i];
}
