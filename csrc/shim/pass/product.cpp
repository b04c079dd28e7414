#include "shim/pass/product.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/Parallel.h>

#include "core/pass/zbp_panels.h"
#include "shim/pass/dtensor.h"
#include "shim/pass/saved.h"
#include "shim/pass/path.h"
#include "shim/torch/nodes.h"
#include "shim/work/work.h"

namespace zbp {

namespace {

/// The two matrices whose product is the gradient at a task's face, as the node's own backward multiplies them.
struct Factors {
  at::Tensor left;
  at::Tensor right;

  at::Tensor multiply() const { return left.dim() == 2 ? left.mm(right) : left.bmm(right); }
};

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

/// The product, at the weight where nothing but transpositions and casts lies in between, else at the face.
at::Tensor multiply(const Task& task, const zbp_face& plan) {
  const auto [left, right] = matrices_of(task);
  const Factors factors{oriented(left.matrix, left.is_transposed),
                        oriented(right.matrix, right.is_transposed)};
  const at::Tensor product = factors.multiply();
  const at::AutoDispatchBelowADInplaceOrView no_view;  // see NodeParts::apply_without_views_to()
  return oriented(product, is_transposed(task, plan));
}

/// Whether BLAS rounds each element of a part of a product, one of a batch or a panel, as in the whole.
/// Measured by benchmarks/panels.py: several threads, or kernels for 16 bits, cut a product by all its sizes.
bool rounds_parts_alike(const Factors& f) {
  const c10::ScalarType type = f.left.scalar_type();
  return (type == at::kFloat || type == at::kDouble) && at::get_num_threads() == 1;
}

/// A view of the matrices, and of their rows or columns, that a piece is.
at::Tensor piece_of(const at::Tensor& tensor, const zbp_panel& piece, int64_t dim) {
  const at::Tensor matrices =
      tensor.dim() == 3 ? tensor.narrow(0, piece.batch, piece.batch_count) : tensor;
  return piece.is_cut && dim != 0 ? matrices.narrow(dim, piece.begin, piece.count) : matrices;
}

/// Adds `left @ right`, rounded to `type`, to `sum`, a gradient on the CPU, as `sum += ...` does. Where the
/// bits are the same, piece by piece: see zbp_panels.h. BLAS's own accumulation (beta = 1) rounds once per block of
/// the inner dimension where this rounds twice in all, and differs from an ordinary backward. Pieces that a W that
/// raised has `added` are passed over.
void add_panels(const at::Tensor& sum, const Factors& f, c10::ScalarType type, int64_t& added) {
  if (!rounds_parts_alike(f) && added == 0) {
    sum.add_(f.multiply().to(type));
    ++added;
    return;
  }
  const int64_t batches = sum.dim() == 2 ? 1 : sum.size(0);
  zbp_panels panels = zbp_panels_of(batches, sum.size(-2), sum.size(-1));
  zbp_panel piece;
  for (int64_t i = 0; zbp_panels_next(&panels, &piece); ++i) {
    if (i >= added) {
      const Factors part{piece_of(f.left, piece, piece.by_rows ? -2 : 0),
                         piece_of(f.right, piece, piece.by_rows ? 0 : -1)};
      piece_of(sum, piece, piece.by_rows ? -2 : -1).add_(part.multiply().to(type));
      ++added;
    }
  }
}

}  // namespace

bool is_product(const Task& task, const zbp_face& plan) {
  return task.kind() == Kind::product && plan.slot == task.matrix_slot &&
         task.output_grads[0].tensor().defined();
}

bool add_product_to(const at::Tensor& grad, c10::ScalarType type, const Task& task, size_t i,
                    bool fuse, int64_t& panels_added) {
  const zbp_face& plan = task.plan(i);
  const bool is_simple = (plan.flag & ZBP_FACE_SIMPLE) != 0;
  std::optional<at::Tensor> sum = is_simple ? grad : view_along(task.face[i], grad);
  if (!sum) {
    return false;
  }
  const auto [left, right] = matrices_of(task);
  const bool sum_is_transposed = is_transposed(task, plan);
  Factors f{left.matrix, right.matrix};
  if (is_subclass(grad)) {
    auto local = is_simple ? local_product({grad, sum_is_transposed}, left, right) : std::nullopt;
    if (!local) {
      return false;
    }
    sum = std::move(local->sum);
    f = {std::move(local->left), std::move(local->right)};
  }
  f = {oriented(f.left, left.is_transposed), oriented(f.right, right.is_transposed)};
  sum = oriented(*sum, sum_is_transposed);
  if (at::has_internal_overlap(*sum) != at::MemOverlap::No || sum->dim() != f.left.dim() ||
      sum->size(-2) != f.left.size(-2) || sum->size(-1) != f.right.size(-1) ||
      sum->device() != f.left.device() || sum->is_alias_of(f.left) || sum->is_alias_of(f.right)) {
    return false;
  }
  const bool adds_in_one =
      sum->scalar_type() == f.left.scalar_type() && (fuse || !sum->is_cpu()) && panels_added == 0;
  if (adds_in_one) {
    sum->dim() == 2 ? sum->addmm_(f.left, f.right) : sum->baddbmm_(f.left, f.right);
  } else if (sum->is_cpu()) {
    add_panels(*sum, f, type, panels_added);
    panels_added = 0;
  } else {
    sum->add_(f.multiply().to(type));
  }
  return true;
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
