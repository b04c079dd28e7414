#include "shim/kinds.h"

#include <cstring>
#include <typeinfo>

#include <ATen/SavedTensorHooks.h>
#include <torch/csrc/autograd/generated/Functions.h>
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/python_function.h>

namespace zbp {

namespace gen = torch::autograd::generated;
using torch::autograd::SavedVariable;

namespace {

template <class T>
T* as(Node& node) {
  return typeid(node) == typeid(T) ? static_cast<T*>(&node) : nullptr;
}

bool is_one(const at::Scalar& scalar) {
  return scalar.equal(1);
}

bool is_heavy(const Face& face) {
  const auto& metadata = face.edge.function->input_metadata(face.edge.input_nr);
  return metadata.is_nested_tensor() || metadata.shape_as_dim_vector().size() > 1;
}

/// While it lives, a SavedVariable that is made here is stored as it is: default hooks of a
/// surrounding saved_tensors_hooks context would pack it once more.
class NoSavedTensorHooks {
 public:
  NoSavedTensorHooks() : saved_(at::SavedTensorDefaultHooks::get_tls_state()) {
    at::SavedTensorDefaultHooks::set_tls_state({});
  }
  ~NoSavedTensorHooks() { at::SavedTensorDefaultHooks::set_tls_state(saved_); }
  NoSavedTensorHooks(const NoSavedTensorHooks&) = delete;
  NoSavedTensorHooks& operator=(const NoSavedTensorHooks&) = delete;

 private:
  at::impl::SavedTensorDefaultHooksTLS saved_;
};

/// Unpacks a saved tensor once and puts it back plainly and without history. What W will read shares its
/// version counter with the original; of the rest W needs the shape alone, and it may change.
at::Tensor pin(SavedVariable& saved, Node& node, bool is_read_by_w) {
  at::Tensor tensor = saved.unpack(ref_of(node));
  if (!tensor.defined()) {
    return tensor;  // not saved: the other factor takes no gradient
  }
  tensor = is_read_by_w ? tensor.detach() : tensor.variable_data();
  const NoSavedTensorHooks guard;
  saved = SavedVariable(tensor, /*is_output=*/false);
  return tensor;
}

bool is_plain_matrix(const at::Tensor& tensor) {
  return tensor.defined() && !is_subclass(tensor) && tensor.dim() == 2 && !tensor.is_complex() &&
         !tensor.is_neg();
}

void become_deferred(Task& task) {
  task.kind = Kind::deferred;
  for (Face& face : task.face) {
    give_up_transposition(face);
  }
}

const Face* face_at(c10::ArrayRef<Face> face, uint32_t slot) {
  for (const Face& f : face) {
    if (f.slot == slot) {
      return &f;
    }
  }
  return nullptr;
}

}  // namespace

std::optional<TwoFactors> two_factors(Node& node) {
  if (auto* n = as<gen::AddmmBackward0>(node)) {
    return TwoFactors{&n->mat1_, &n->mat2_, 1, 2, is_one(n->alpha) && is_one(n->beta)};
  }
  if (auto* n = as<gen::MmBackward0>(node)) {
    return TwoFactors{&n->self_, &n->mat2_, 0, 1, true};
  }
  if (auto* n = as<gen::BmmBackward0>(node)) {
    return TwoFactors{&n->self_, &n->mat2_, 0, 1, false};
  }
  if (auto* n = as<gen::BaddbmmBackward0>(node)) {
    return TwoFactors{&n->batch1_, &n->batch2_, 1, 2, false};
  }
  if (auto* n = as<gen::LinearBackward0>(node)) {
    return TwoFactors{&n->input_, &n->weight_, 0, 1, false};
  }
  if (auto* n = as<gen::ConvolutionBackward0>(node)) {
    return TwoFactors{&n->input_, &n->weight_, 0, 1, false};
  }
  return std::nullopt;
}

Kind classify(Node& node, c10::ArrayRef<Face> face) {
  // A post hook is owed all of the node's gradients at once.
  if (!node.post_hooks().empty()) {
    return Kind::whole;
  }
  const auto factors = two_factors(node);
  if (!factors) {
    return Kind::whole;
  }
  const Face* left = face_at(face, factors->left_slot);
  const Face* right = face_at(face, factors->right_slot);
  if (!((left && is_heavy(*left)) || (right && is_heavy(*right)))) {
    return Kind::whole;
  }
  return factors->plain_product && (left == nullptr) != (right == nullptr) ? Kind::product
                                                                           : Kind::deferred;
}

void take_matrices(Task& task, Node& node, const variable_list& grads) {
  task.output_grads.clear();
  for (const at::Tensor& grad : grads) {
    task.output_grads.emplace_back(grad);
  }
  const TwoFactors factors = *two_factors(node);
  if (task.kind == Kind::product) {
    task.weight_is_left = face_at(task.face, factors.left_slot) != nullptr;
    task.matrix_slot = task.weight_is_left ? factors.left_slot : factors.right_slot;
    SavedVariable& saved = task.weight_is_left ? *factors.right : *factors.left;
    const at::Tensor other =
        saved.has_hooks() ? pin(saved, node, true) : saved.unpack(ref_of(node));
    const bool gradient_is_plain = !grads[0].defined() || is_plain_matrix(grads[0]);
    if (is_plain_matrix(other) && gradient_is_plain) {
      task.other = Watched(other);
      return;
    }
    become_deferred(task);
  }
  // Also without hooks: a saved tensor that is a stage output is about to lose its history.
  const bool reads_left = face_at(task.face, factors.right_slot) != nullptr;
  const bool reads_right = face_at(task.face, factors.left_slot) != nullptr;
  const at::Tensor left = pin(*factors.left, node, reads_left);
  const at::Tensor right = pin(*factors.right, node, reads_right);
  task.saved = {Watched(reads_left ? left : at::Tensor()),
                Watched(reads_right ? right : at::Tensor())};
}

bool gives_matrix_gradient(const Task& task, Node& node, const Face& face) {
  const auto factors = task.kind == Kind::product ? two_factors(node) : std::nullopt;
  return factors && (face.slot == factors->left_slot || face.slot == factors->right_slot);
}

void give_up_transposition(Face& face) {
  if (face.transposed) {
    face.transposed = false;
    face.weight = -1;
  }
}

// at::isTensorSubclassLike() would also say yes to every tensor under a dispatch mode.
bool is_subclass(const at::Tensor& tensor) {
  using c10::DispatchKey;
  return tensor.layout() != at::kStrided ||
         tensor.key_set().has_any(c10::DispatchKeySet(
             {DispatchKey::Python, DispatchKey::Batched, DispatchKey::FuncTorchBatched,
              DispatchKey::FuncTorchGradWrapper, DispatchKey::Functionalize}));
}

bool has_hooks(Node& node) {
  return !node.pre_hooks().empty() || !node.tensor_pre_hooks().empty() ||
         !node.retains_grad_hooks().empty() || !node.post_hooks().empty();
}

bool is_plain_transposition(const Edge& edge, Edge* next) {
  Node& node = *edge.function;
  bool transposes = false;
  if (as<gen::TBackward0>(node)) {
    transposes = node.input_metadata(0).shape_as_dim_vector().size() == 2;
  } else if (auto* n = as<gen::TransposeBackward0>(node)) {
    transposes =
        node.input_metadata(0).shape_as_dim_vector().size() == 2 && (n->dim0 - n->dim1) % 2 != 0;
  } else if (auto* n = as<gen::PermuteBackward0>(node)) {
    transposes = n->dims.size() == 2 && (n->dims[0] - n->dims[1]) % 2 != 0 && n->dims[0] % 2 != 0;
  }
  if (!transposes || has_hooks(node)) {
    return false;
  }
  *next = node.next_edge(0);
  return next->is_valid();
}

bool is_generated(const Node& node) {
  return std::strstr(typeid(node).name(), "5torch8autograd9generated") != nullptr;
}

bool saved_nothing(Node& node) {
  if (is_python_function(node)) {
    THPObjectPtr context(torch::autograd::functionToPyObject(ref_of(node)));
    return context && reinterpret_cast<THPFunction*>(context.get())->saved_variables.empty();
  }
  return as<gen::AddBackward0>(node) || as<gen::SubBackward0>(node);
}

bool is_python_function(const Node& node) {
  return std::strstr(typeid(node).name(), "5torch8autograd6PyNode") != nullptr;
}

}  // namespace zbp
