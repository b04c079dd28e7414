#include "shim/torch/accumulate.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/CPUBlas.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <torch/csrc/autograd/variable.h>

#include "shim/torch/transposed.h"

namespace zbp {

namespace {

using at::BFloat16;
using at::Half;

// Elements of the blocks in which the factors are laid out anew: of the left one, and of the right one's columns.
constexpr int64_t MOST_ROWS = 1024;
template <class T>
constexpr int64_t MOST_INNER = 2048 / sizeof(T);
constexpr int64_t STRIP = 64;
constexpr int64_t AHEAD = 16;  // lines

/// A matrix in memory.
template <class T>
struct View {
  const T* data;
  int64_t row_stride, column_stride;

  View from(int64_t row, int64_t column) const {
    return {data + row * row_stride + column * column_stride, row_stride, column_stride};
  }
};

/// Matrices of the same sizes in memory; a single one is a batch of 1.
template <class T>
struct Batch {
  View<T> first;
  int64_t stride;

  View<T> operator[](int64_t i) const {
    return {first.data + i * stride, first.row_stride, first.column_stride};
  }
};

int64_t batch_stride(const at::Tensor& matrices) {
  return matrices.dim() == 2 ? 0 : matrices.stride(0);
}

template <class T>
Batch<T> batch_of(const at::Tensor& matrices) {
  return {
      {static_cast<const T*>(matrices.const_data_ptr()), matrices.stride(-2), matrices.stride(-1)},
      batch_stride(matrices)};
}

template <class From, class To>
void copy_line(const From* from, int64_t stride, int64_t count, To* to) {
  if (stride == 1) {
    std::copy(from, from + count, to);
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    to[i] = static_cast<To>(from[i * stride]);
  }
}

/// Of a matrix that is laid out by columns, in tiles whose lines fit a processor's registers.
template <class From, class To>
void transpose_tile(const View<From>& from, To* to, int64_t to_stride) {
  constexpr int TILE = 8;
  To tile[TILE][TILE];
  for (int64_t c = 0; c < TILE; ++c) {
    const From* column = from.data + c * from.column_stride;
    for (int64_t r = 0; r < TILE; ++r) {
      tile[r][c] = static_cast<To>(column[r]);
    }
  }
  for (int64_t r = 0; r < TILE; ++r) {
    std::copy(tile[r], tile[r] + TILE, to + r * to_stride);
  }
}

template <class From, class To>
void copy_block(const View<From>& from, int64_t rows, int64_t columns, To* to, int64_t to_stride) {
  constexpr int64_t TILE = 8;
  for (int64_t r = 0; r < rows;) {
    const bool has_tiles = from.row_stride == 1 && rows - r >= TILE;
    int64_t c = 0;
    for (; has_tiles && c + TILE <= columns; c += TILE) {
      transpose_tile(from.from(r, c), to + r * to_stride + c, to_stride);
    }
    for (const int64_t end = has_tiles ? r + TILE : r + 1; r < end; ++r) {
      copy_line(from.from(r, c).data, from.column_stride, columns - c, to + r * to_stride + c);
    }
  }
}

/// What the kernels of a dtype want: the left factor by rows, of the right one strips of so many columns, in which
/// those of 16 bits have two rows side by side.
template <class T>
constexpr int64_t PAIR = sizeof(T) == 2 ? 2 : 1;

template <class T>
constexpr int64_t padded(int64_t inner) {
  return (inner + PAIR<T> - 1) / PAIR<T> * PAIR<T>;
}

template <class From, class To, class Stride>
void interleave(const From* first, const From* second, Stride stride, int64_t count, To* to) {
  for (int64_t i = 0; i < count; ++i) {
    const To two[2] = {static_cast<To>(first[i * stride]), static_cast<To>(second[i * stride])};
    std::memcpy(to + 2 * i, two, sizeof two);
  }
}

template <class From, class To>
void pack_two(const From* first, const From* second, int64_t stride, int64_t columns, To* to) {
  if (stride == 1) {
    interleave(first, second, std::integral_constant<int64_t, 1>(), columns, to);
  } else {
    interleave(first, second, stride, columns, to);
  }
}

/// A strip is narrow: the processor does not foresee its lines.
template <class T>
void fetch_ahead(const T* line, int64_t count) {
  constexpr int64_t CACHE_LINE = 64 / sizeof(T);
  for (int64_t i = 0; i < count; i += CACHE_LINE) {
    __builtin_prefetch(line + i);
  }
}

/// `rows` of the inner dimension, from `at` of the packed block on.
template <class From, class To>
void pack_strip(const View<From>& from, int64_t rows, int64_t columns, int64_t at, To* to) {
  for (int64_t r = 0; r < rows;) {
    const int64_t row = at + r;
    const From* line = from.from(r, 0).data;
    for (int64_t ahead = r + AHEAD; ahead < std::min(rows, r + AHEAD + PAIR<To>); ++ahead) {
      fetch_ahead(from.from(ahead, 0).data, from.column_stride == 1 ? columns : 0);
    }
    if constexpr (PAIR<To> == 1) {
      copy_line(line, from.column_stride, columns, to + row * columns);
      ++r;
    } else if (row % 2 == 0 && r + 1 < rows) {
      pack_two(line, line + from.row_stride, from.column_stride, columns, to + row * columns);
      r += 2;
    } else {
      for (int64_t c = 0; c < columns; ++c) {
        to[row / 2 * 2 * columns + 2 * c + row % 2] = static_cast<To>(line[c * from.column_stride]);
      }
      ++r;
    }
  }
}

template <class T>
void multiply_by_hand(int64_t rows, int64_t columns, int64_t inner, const T* left, const T* strip,
                      float* sum, int64_t sum_stride) {
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < columns; ++c) {
      float total = 0;
      for (int64_t k = 0; k < inner; ++k) {
        const int64_t at = (k - k % PAIR<T>)*columns + c * PAIR<T> + k % PAIR<T>;
        total += static_cast<float>(left[r * inner + k]) * static_cast<float>(strip[at]);
      }
      sum[r * sum_stride + c] += total;
    }
  }
}

/// A kernel is made for each combination of sizes when it is used first, which may fail.
template <class T>
void multiply(int64_t rows, int64_t columns, int64_t inner, const T* left, const T* strip,
              float* sum, int64_t sum_stride) noexcept {
  try {
    at::native::cpublas::brgemm(rows, columns, inner, inner, columns, sum_stride, /*add_C=*/true,
                                left, strip, sum, /*is_vnni=*/PAIR<T> == 2);
  } catch (...) {
    multiply_by_hand(rows, columns, inner, left, strip, sum, sum_stride);
  }
}

/// Whether this processor has kernels for the dtype, which take factors that are packed so.
template <class T>
bool probe() {
  constexpr int64_t N = 32;
  T left[N * N];
  T strip[N * N];
  float sum[N * N] = {};
  for (int64_t i = 0; i < N * N; ++i) {
    left[i] = static_cast<T>(static_cast<float>(i % 7 - 3));
    strip[i] = static_cast<T>(static_cast<float>(i % 5 - 2));
  }
  float expected[N * N] = {};
  multiply_by_hand(N, N, N, left, strip, expected, N);
  try {
    at::native::cpublas::brgemm(N, N, N, N, N, N, /*add_C=*/true, left, strip, sum,
                                /*is_vnni=*/PAIR<T> == 2);
    at::native::cpublas::brgemm_release(PAIR<T> == 2);
  } catch (...) {
    return false;
  }
  return std::equal(sum, sum + N * N, expected);
}

template <class T>
bool has_kernels() {
  static const bool known = probe<T>();
  return known;
}

/// A part of one product's inner dimension, and where it lies in a block.
struct Slice {
  size_t product;
  int64_t begin, count, at;
};

/// The inner dimensions of all products, one after the other, in blocks.
std::vector<std::vector<Slice>> blocks_of(c10::ArrayRef<MatrixProduct> products, int64_t most) {
  std::vector<std::vector<Slice>> blocks;
  int64_t filled = most;
  for (size_t p = 0; p < products.size(); ++p) {
    const int64_t inner = products[p].left.size(-1);
    for (int64_t begin = 0; begin < inner;) {
      if (filled == most) {
        blocks.emplace_back();
        filled = 0;
      }
      const int64_t count = std::min(inner - begin, most - filled);
      blocks.back().push_back({p, begin, count, filled});
      begin += count;
      filled += count;
    }
  }
  return blocks;
}

/// Of the deepest, even.
int64_t depth_of(const std::vector<std::vector<Slice>>& blocks) {
  return blocks.empty() ? 0 : (blocks[0].back().at + blocks[0].back().count + 1) / 2 * 2;
}

/// The kernels are a third slower where it does not begin with a line of the cache, as libtorch's tensors do.
template <class T>
at::DataPtr allocated(int64_t count) {
  return c10::GetCPUAllocator()->allocate(static_cast<size_t>(count) * sizeof(T));
}

/// From: the factors' dtype; To: that of the kernels.
template <class From, class To>
class Sum {
  // Where nothing is converted, bits are moved: numbers of 16 bits are classes to the compiler.
  using Bits = std::conditional_t<sizeof(To) == 2, uint16_t, uint32_t>;
  static constexpr bool IS_SAME = std::is_same_v<From, To>;
  using Source = std::conditional_t<IS_SAME, Bits, From>;
  using Target = std::conditional_t<IS_SAME, Bits, To>;

 public:
  Sum(const at::Tensor& sum, c10::ArrayRef<MatrixProduct> products)
      : batches_(sum.dim() == 2 ? 1 : sum.size(0)),
        rows_(sum.size(-2)),
        columns_(sum.size(-1)),
        sums_(sum.data_ptr<float>()),
        batch_stride_(batch_stride(sum)),
        sum_stride_(sum.stride(-2)),
        blocks_(blocks_of(products, MOST_INNER<To>)),
        depth_(depth_of(blocks_)),
        left_memory_(allocated<To>(std::min(rows_, MOST_ROWS) * depth_)),
        right_memory_(allocated<To>(at::get_num_threads() * STRIP * depth_)),
        left_block_(static_cast<To*>(left_memory_.get())),
        strips_(static_cast<To*>(right_memory_.get())) {
    for (const MatrixProduct& product : products) {
      left_.push_back(batch_of<Source>(product.left));
      right_.push_back(batch_of<Source>(product.right));
    }
  }

  void add() noexcept {
    for (batch_ = 0; batch_ < batches_; ++batch_) {
      add_matrix();
    }
  }

 private:
  void add_matrix() {
    for (int64_t row = 0; row < rows_; row += MOST_ROWS) {
      const int64_t rows = std::min(MOST_ROWS, rows_ - row);
      for (const auto& block : blocks_) {
        const int64_t inner = block.back().at + block.back().count;
        pack_left(block, row, rows, inner);
        multiply_block(block, row, rows, inner);
      }
    }
  }

  void pack_left(const std::vector<Slice>& block, int64_t row, int64_t rows, int64_t inner) {
    const int64_t stride = padded<To>(inner);
    for (const Slice& slice : block) {
      copy_block(left_[slice.product][batch_].from(row, slice.begin), rows, slice.count,
                 reinterpret_cast<Target*>(left_block_) + slice.at, stride);
    }
    for (int64_t r = 0; r < rows && stride > inner; ++r) {
      left_block_[r * stride + inner] = To(0);
    }
  }

  void pack_right(const std::vector<Slice>& block, int64_t column, int64_t columns, int64_t inner,
                  To* to) {
    if (padded<To>(inner) > inner) {
      std::fill(to + (inner - 1) * columns, to + (inner + 1) * columns, To(0));
    }
    for (const Slice& slice : block) {
      pack_strip(right_[slice.product][batch_].from(slice.begin, column), slice.count, columns,
                 slice.at, reinterpret_cast<Target*>(to));
    }
  }

  void multiply_block(const std::vector<Slice>& block, int64_t row, int64_t rows, int64_t inner) {
    const int64_t depth = padded<To>(inner);
    float* const sum = sums_ + batch_ * batch_stride_ + row * sum_stride_;
    at::parallel_for(0, (columns_ + STRIP - 1) / STRIP, 1, [&](int64_t first, int64_t end) {
      To* const strip = strips_ + at::get_thread_num() * STRIP * depth_;
      for (int64_t s = first; s < end; ++s) {
        const int64_t column = s * STRIP;
        const int64_t width = std::min(STRIP, columns_ - column);
        pack_right(block, column, width, inner, strip);
        multiply(rows, width, depth, left_block_, strip, sum + column, sum_stride_);
      }
      at::native::cpublas::brgemm_release(PAIR<To> == 2);
    });
  }

  const int64_t batches_, rows_, columns_;
  float* const sums_;
  const int64_t batch_stride_, sum_stride_;
  const std::vector<std::vector<Slice>> blocks_;
  const int64_t depth_;
  std::vector<Batch<Source>> left_, right_;
  int64_t batch_ = 0;
  const at::DataPtr left_memory_, right_memory_;
  To* const left_block_;
  To* const strips_;  // one per thread
};

template <class From>
void accumulate_matrix(const at::Tensor& sum, c10::ArrayRef<MatrixProduct> products) {
  if (has_kernels<From>()) {
    Sum<From, From>(sum, products).add();
  } else {
    Sum<From, float>(sum, products).add();
  }
}

void accumulate_matrices(const at::Tensor& sum, c10::ArrayRef<MatrixProduct> products) {
  switch (products[0].left.scalar_type()) {
    case at::kBFloat16:
      return accumulate_matrix<BFloat16>(sum, products);
    case at::kHalf:
      return accumulate_matrix<Half>(sum, products);
    default:
      return Sum<float, float>(sum, products).add();
  }
}

bool is_plain(const at::Tensor& tensor) {
  return tensor.is_cpu() && tensor.layout() == at::kStrided && !tensor.is_neg() &&
         !tensor.unsafeGetTensorImpl()->is_python_dispatch();
}

/// Some builds of torch, those for other processors than x86 among them, have no kernels at all.
bool has_kernels_for(c10::ScalarType type) {
  return (type == at::kFloat || type == at::kBFloat16 || type == at::kHalf) && has_kernels<float>();
}

/// The same sum, laid out by rows.
MatrixProduct transposed(const MatrixProduct& product) {
  return {transposed_factor(product.right), transposed_factor(product.left)};
}

}  // namespace

bool can_accumulate(const at::Tensor& sum, const MatrixProduct& product) {
  const auto& [left, right] = product;
  return is_plain(sum) && is_plain(left) && is_plain(right) && sum.scalar_type() == at::kFloat &&
         has_kernels_for(left.scalar_type()) && left.scalar_type() == right.scalar_type() &&
         sum.numel() > 0 && (sum.stride(-1) == 1 || sum.stride(-2) == 1);
}

bool can_accumulate_on_device(const at::Tensor& sum, const MatrixProduct& product) {
  const auto& [left, right] = product;
  const c10::DispatchKey backend = c10::toRuntimePerBackendFunctionalityKey(
      c10::DispatchKey::Dense, sum.key_set().highestBackendKey());
  const char* const name = sum.dim() == 2 ? "aten::addmm" : "aten::baddbmm";
  const auto kernel = c10::Dispatcher::singleton().findSchema({name, "dtype_out"});
  return !sum.is_cpu() && kernel && kernel->hasKernelForDispatchKey(backend) &&
         sum.scalar_type() == at::kFloat && left.scalar_type() == right.scalar_type() &&
         sum.layout() == c10::kStrided && left.layout() == c10::kStrided &&
         right.layout() == c10::kStrided && sum.numel() > 0;
}

void accumulate_on_device(at::Tensor& sum, const MatrixProduct& product) {
  const auto& [left, right] = product;
  sum.dim() == 2 ? at::addmm_outf(sum, left, right, at::kFloat, 1, 1, sum)
                 : at::baddbmm_outf(sum, left, right, at::kFloat, 1, 1, sum);
}

void accumulate(const at::Tensor& sum, c10::ArrayRef<MatrixProduct> products) {
  if (sum.stride(-1) != 1) {
    std::vector<MatrixProduct> other_way;
    std::transform(products.begin(), products.end(), std::back_inserter(other_way), transposed);
    return accumulate(sum.mT(), other_way);
  }
  torch::autograd::impl::bump_version(sum);
  accumulate_matrices(sum, products);
}

}  // namespace zbp
