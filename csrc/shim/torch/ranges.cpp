#include "shim/torch/ranges.h"

#include <algorithm>

#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/object_ptr.h>

#include "shim/torch/gil.h"

namespace zbp {

namespace {

constexpr size_t most_names = 4;

/// Called with the GIL held; leaves no error set.
std::string name_of_weight(const at::Tensor& weight) {
  THPObjectPtr parameter(THPVariable_Wrap(weight));
  THPObjectPtr name(parameter ? PyObject_GetAttrString(parameter, "_zbpipe_name") : nullptr);
  const char* text = name && PyUnicode_Check(name.get()) ? PyUnicode_AsUTF8(name.get()) : nullptr;
  PyErr_Clear();
  return text ? text : c10::str(weight.sym_sizes());
}

}  // namespace

std::string ProfiledRange::name_of(const Group& group) {
  const AcquireGil gil;
  std::vector<at::Tensor> weights;
  for (const Weight& weight : group.weights) {
    weights.push_back(weight.accumulator->variable);
  }
  std::stable_sort(weights.begin(), weights.end(),
                   [](const at::Tensor& a, const at::Tensor& b) { return a.dim() > b.dim(); });
  std::string name = "zbpipe::group ";
  for (size_t i = 0; i < std::min(weights.size(), most_names); ++i) {
    name += (i > 0 ? ", " : "") + name_of_weight(weights[i]);
  }
  if (group.weights.size() > most_names) {
    name += c10::str(" and ", group.weights.size() - most_names, " more");
  }
  return name;
}

}  // namespace zbp
