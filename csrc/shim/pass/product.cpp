#include "shim/pass/product.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include "shim/pass/dtensor.h"
#include "shim/pass/saved.h"
#include "shim/pass/path.h"
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
  const Operand other{task.packed.empty() ? task.other.tensor() : task.packed[0]->unpack(), true};
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

/// A product on its way into a gradient, which is seen as the product is laid out.
struct Addition {
  at::Tensor sum;
  at::Tensor left;
  at::Tensor right;
};

bool is_wider(c10::ScalarType sum, c10::ScalarType product) {
  return sum != product && c10::promoteTypes(sum, product) == sum;
}

/// Whether the device multiplies 16-bit matrices into a float32 sum, as CUDA does.
bool has_wide_kernel(const Addition& a) {
  const c10::DispatchKey backend = c10::toRuntimePerBackendFunctionalityKey(
      c10::DispatchKey::Dense, a.sum.key_set().highestBackendKey());
  const char* const name = a.sum.dim() == 2 ? "aten::addmm" : "aten::baddbmm";
  const auto kernel = c10::Dispatcher::singleton().findSchema({name, "dtype_out"});
  return !a.sum.is_cpu() && kernel && kernel->hasKernelForDispatchKey(backend) &&
         a.sum.scalar_type() == at::kFloat && a.left.scalar_type() == a.right.scalar_type() &&
         a.sum.layout() == c10::kStrided && a.left.layout() == c10::kStrided &&
         a.right.layout() == c10::kStrided && a.sum.numel() > 0;
}

void add_in_one(const Addition& a) {
  at::Tensor sum = a.sum;
  sum.dim() == 2 ? sum.addmm_(a.left, a.right) : sum.baddbmm_(a.left, a.right);
}

void add_wide(const Addition& a) {
  at::Tensor sum = a.sum;
  if (has_wide_kernel(a)) {
    sum.dim() == 2 ? at::addmm_outf(sum, a.left, a.right, at::kFloat, 1, 1, sum)
                   : at::baddbmm_outf(sum, a.left, a.right, at::kFloat, 1, 1, sum);
  } else {
    add_in_one({sum, a.left.to(sum.scalar_type()), a.right.to(sum.scalar_type())});
  }
}

/// On the CPU `sum += left @ right`, to the bit: BLAS's own accumulation (beta = 1) rounds once per block of the inner
/// dimension where this rounds twice in all, and differs from an ordinary backward.
void add(const Addition& a, c10::ScalarType type, zbp_how how) {
  if (a.sum.scalar_type() == a.left.scalar_type() && (how.fuse || !a.sum.is_cpu())) {
    add_in_one(a);
  } else if (how.fuse && is_wider(a.sum.scalar_type(), a.left.scalar_type())) {
    add_wide(a);
  } else {
    a.sum.add_(product_of(a.left, a.right).to(type));
  }
}

}  // namespace

bool is_product(const Task& task, const zbp_face& plan) {
  return task.kind() == Kind::product && plan.slot == task.matrix_slot &&
         task.output_grads[0].tensor().defined();
}

bool add_in_place(const at::Tensor& grad, c10::ScalarType type, const Task& task, size_t i,
                  zbp_how how) {
  const zbp_face& plan = task.plan(i);
  const bool is_simple = (plan.flag & ZBP_FACE_SIMPLE) != 0;
  std::optional<at::Tensor> sum = is_simple ? grad : view_along(task.face[i], grad);
  if (!sum) {
    return false;
  }
  const auto [left, right] = matrices_of(task);
  const bool sum_is_transposed = is_transposed(task, plan);
  Addition a{*sum, left.matrix, right.matrix};
  if (is_subclass(grad)) {
    auto local = is_simple ? local_product({grad, sum_is_transposed}, left, right) : std::nullopt;
    if (!local) {
      return false;
    }
    a = {std::move(local->sum), std::move(local->left), std::move(local->right)};
  }
  a.left = factor(a.left, left.is_transposed);
  a.right = factor(a.right, right.is_transposed);
  a.sum = oriented(a.sum, sum_is_transposed);
  if (at::has_internal_overlap(a.sum) != at::MemOverlap::No || a.sum.dim() != a.left.dim() ||
      a.sum.size(-2) != a.left.size(-2) || a.sum.size(-1) != a.right.size(-1) ||
      a.sum.device() != a.left.device() || a.sum.is_alias_of(a.left) ||
      a.sum.is_alias_of(a.right)) {
    return false;
  }
  add(a, type, how);
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

}  // namespace zbp
