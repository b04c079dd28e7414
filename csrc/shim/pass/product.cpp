#include "shim/pass/product.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/Parallel.h>

#include "core/pass/zbp_panels.h"
#include "shim/pass/dtensor.h"
#include "shim/pass/saved.h"
#include "shim/pass/path.h"
#include "shim/torch/accumulate.h"
#include "shim/torch/nodes.h"
#include "shim/torch/transposed.h"
#include "shim/work/work.h"

namespace zbp {

namespace {

at::Tensor product_of(const at::Tensor& left, const at::Tensor& right) {
  return left.dim() == 2 ? left.mm(right) : left.bmm(right);
}

/// The two matrices whose product is the gradient at a task's face, as the node's own backward multiplies them.
/// For Y = A B: dA = dY Bᵀ, dB = Aᵀ dY, or both sides of that transposed.
std::pair<Operand, Operand> matrices_of(const Task& task) {
  const Operand grad{task.output_grads[0].tensor(), false};
  const Operand other{task.packed ? task.packed->unpack() : task.other.tensor(), true};
  const auto [left, right] = task.weight_is_left ? std::pair(grad, other) : std::pair(other, grad);
  if (!is_multiplied_transposed(task)) {
    return {left, right};
  }
  return {{right.matrix, !right.is_transposed}, {left.matrix, !left.is_transposed}};
}

/// Whether what lies at the weight, or at the face where there is more than transpositions in between, is
/// transposed against the product.
bool is_transposed(const Task& task, const zbp_face& plan) {
  return is_multiplied_transposed(task) != ((plan.flag & ZBP_FACE_TRANSPOSED) != 0);
}

at::Tensor oriented(const at::Tensor& matrix, bool is_transposed) {
  return is_transposed ? matrix.mT() : matrix;
}

/// To be read and let go.
at::Tensor factor(const at::Tensor& matrix, bool is_transposed) {
  return is_transposed ? transposed_factor(matrix) : matrix;
}

/// The product, at the weight where nothing but transpositions and casts lies in between, else at the face.
at::Tensor multiply(const Task& task, const zbp_face& plan) {
  const auto [left, right] = matrices_of(task);
  const at::Tensor product = product_of(factor(left.matrix, left.is_transposed),
                                        factor(right.matrix, right.is_transposed));
  const at::AutoDispatchBelowADInplaceOrView no_view;  // see NodeParts::apply_without_views_to()
  return oriented(product, is_transposed(task, plan));
}

/// Whether BLAS rounds each element of a part of a product, one of a batch or a panel, as in the whole.
/// Measured by benchmarks/panels.py: several threads, or kernels for 16 bits, cut a product by all its sizes.
bool rounds_parts_alike(const Addition& a) {
  const c10::ScalarType type = a.left.scalar_type();
  return (type == at::kFloat || type == at::kDouble) && at::get_num_threads() == 1;
}

/// A view of the matrices, and of their rows or columns, that a piece is.
at::Tensor piece_of(const at::Tensor& tensor, const zbp_panel& piece, int64_t dim) {
  const at::Tensor matrices =
      tensor.dim() == 3 ? tensor.narrow(0, piece.batch, piece.batch_count) : tensor;
  return piece.is_cut && dim != 0 ? matrices.narrow(dim, piece.begin, piece.count) : matrices;
}

enum class Way : uint8_t { in_one, wide, wide_on_device, whole, by_panels };

bool is_wider(c10::ScalarType sum, c10::ScalarType product) {
  return sum == at::kFloat && (product == at::kBFloat16 || product == at::kHalf);
}

/// On the CPU `sum += left @ right`, to the bit: piece by piece where the bits are the same, see zbp_panels.h.
/// BLAS's own accumulation (beta = 1) rounds once per block of the inner dimension where this rounds twice in
/// all, and differs from an ordinary backward. What a W that raised has begun by pieces goes on so.
Way way_of(const Addition& a, zbp_how how) {
  const c10::ScalarType sum = a.sum.scalar_type();
  const c10::ScalarType product = a.left.scalar_type();
  if (a.panels_added == 0 && sum == product && (how.fuse || !a.sum.is_cpu())) {
    return Way::in_one;
  }
  if (a.panels_added == 0 && how.wide && is_wider(sum, product)) {
    if (can_accumulate(a.sum, {a.left, a.right})) {
      return Way::wide;
    }
    if (can_accumulate_on_device(a.sum, {a.left, a.right})) {
      return Way::wide_on_device;
    }
  }
  return a.sum.is_cpu() && (rounds_parts_alike(a) || a.panels_added > 0) ? Way::by_panels
                                                                         : Way::whole;
}

void add_piece(const Addition& a, const zbp_panel& piece) {
  const at::Tensor part = product_of(piece_of(a.left, piece, piece.by_rows ? -2 : 0),
                                     piece_of(a.right, piece, piece.by_rows ? 0 : -1));
  piece_of(a.sum, piece, piece.by_rows ? -2 : -1).add_(part.to(a.type));
}

/// Each piece of the gradient gets those of all products before the next one's turn.
void add_by_panels(Additions& additions) {
  const at::Tensor& sum = additions[0].sum;
  const int64_t batches = sum.dim() == 2 ? 1 : sum.size(0);
  zbp_panels panels = zbp_panels_of(batches, sum.size(-2), sum.size(-1));
  zbp_panel piece;
  const int64_t count = zbp_panels_count(&panels);
  for (Addition& a : additions) {
    a.is_done = a.panels_added == count;
  }
  for (int64_t i = 0; zbp_panels_next(&panels, &piece); ++i) {
    for (Addition& a : additions) {
      if (i >= a.panels_added) {
        add_piece(a, piece);
        a.is_done = ++a.panels_added == count;
      }
    }
  }
}

void add_whole(Addition& a, Way way) {
  if (way == Way::whole) {
    a.sum.add_(product_of(a.left, a.right).to(a.type));
  } else if (way == Way::wide_on_device) {
    accumulate_on_device(a.sum, {a.left, a.right});
  } else {
    a.sum.dim() == 2 ? a.sum.addmm_(a.left, a.right) : a.sum.baddbmm_(a.left, a.right);
  }
  a.is_done = true;
}

/// As one product, whose inner dimension is that of all.
void add_accumulated(Additions& additions) {
  SmallVector<MatrixProduct, 1> products;
  for (const Addition& a : additions) {
    products.push_back({a.left, a.right});
  }
  accumulate(additions[0].sum, products);
  for (Addition& a : additions) {
    a.is_done = true;
  }
}

bool is_same_view(const at::Tensor& a, const at::Tensor& b) {
  return a.is_alias_of(b) && a.storage_offset() == b.storage_offset() &&
         a.sizes().equals(b.sizes()) && a.strides().equals(b.strides());
}

}  // namespace

bool is_product(const Task& task, const zbp_face& plan) {
  return task.kind() == Kind::product && plan.slot == task.matrix_slot &&
         task.output_grads[0].tensor().defined();
}

std::optional<Addition> addition_to(const at::Tensor& grad, c10::ScalarType type, const Task& task,
                                    size_t i, int64_t panels_added) {
  const zbp_face& plan = task.plan(i);
  const bool is_simple = (plan.flag & ZBP_FACE_SIMPLE) != 0;
  std::optional<at::Tensor> sum = is_simple ? grad : view_along(task.face[i], grad);
  if (!sum) {
    return std::nullopt;
  }
  const auto [left, right] = matrices_of(task);
  const bool sum_is_transposed = is_transposed(task, plan);
  Addition a{*sum, left.matrix, right.matrix, type, panels_added};
  if (is_subclass(grad)) {
    auto local = is_simple ? local_product({grad, sum_is_transposed}, left, right) : std::nullopt;
    if (!local) {
      return std::nullopt;
    }
    a.sum = std::move(local->sum);
    a.left = std::move(local->left);
    a.right = std::move(local->right);
  }
  a.left = factor(a.left, left.is_transposed);
  a.right = factor(a.right, right.is_transposed);
  a.sum = oriented(a.sum, sum_is_transposed);
  if (at::has_internal_overlap(a.sum) != at::MemOverlap::No || a.sum.dim() != a.left.dim() ||
      a.sum.size(-2) != a.left.size(-2) || a.sum.size(-1) != a.right.size(-1) ||
      a.sum.device() != a.left.device() || a.sum.is_alias_of(a.left) ||
      a.sum.is_alias_of(a.right)) {
    return std::nullopt;
  }
  return a;
}

bool go_together(const Addition& a, const Addition& b, zbp_how how) {
  const Way way = way_of(a, how);
  return way == way_of(b, how) && way != Way::whole && a.sum.is_cpu() &&
         a.left.scalar_type() == b.left.scalar_type() && is_same_view(a.sum, b.sum);
}

void add_all(Additions& additions, zbp_how how) {
  const Way way = way_of(additions[0], how);
  if (way == Way::by_panels) {
    add_by_panels(additions);
  } else if (way == Way::wide ||
             (additions.size() > 1 &&
              can_accumulate(additions[0].sum, {additions[0].left, additions[0].right}))) {
    add_accumulated(additions);
  } else {
    for (Addition& a : additions) {
      add_whole(a, way);
    }
  }
}

at::Tensor face_grad(const Task& task, size_t i, variable_list& outputs) {
  const zbp_face& plan = task.plan(i);
  const bool is_simple = (plan.flag & ZBP_FACE_SIMPLE) != 0;
  at::Tensor grad;
  switch (task.kind()) {
    case Kind::product:
      if (!task.output_grads[0].tensor().defined()) {
        return {};
      }
      if (plan.slot == task.matrix_slot) {
        grad = multiply(task, plan);
        if (is_simple) {
          return grad;
        }
      } else {
        grad = task.output_grads[0]
                   .tensor();  // the added matrix or bias; the engine's rules reduce it
      }
      break;
    case Kind::deferred:
      grad = std::move(outputs[plan.slot]);
      break;
    case Kind::whole:
      grad = kept_grad(task, i);
      break;
    case Kind::root:
      grad = task.output_grads[0].tensor();
      break;
  }
  return (plan.flag & ZBP_FACE_PATH) == 0 ? grad : take_along(task.face[i], std::move(grad));
}

variable_list compute_task(const Task& task) {
  variable_list outputs;
  if (task.kind() == Kind::deferred) {
    outputs = run_deferred(task);
  }
  variable_list grads;
  grads.reserve(task.face.size());
  for (size_t i = 0; i < task.face.size(); ++i) {
    grads.push_back(face_grad(task, i, outputs));
  }
  return grads;
}

}  // namespace zbp
