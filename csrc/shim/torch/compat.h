// The differences between the torch releases that zbpipe supports, in one place.
//
// Nodes are held by std::shared_ptr up to torch 2.12 and by c10::intrusive_ptr from 2.13 on.
// Nothing outside this header may name either: write NodePtr, NodeRef<T>, make_node and ref_of.
#pragma once

#include <Python.h>

#include <memory>
#include <mutex>
#include <utility>

#include <c10/core/Stream.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>
#include <torch/headeronly/version.h>
#if __has_include(<torch/csrc/autograd/node.h>)
#include <torch/csrc/autograd/node.h>
#define ZBP_NODE_IS_INTRUSIVE 1
#else
#define ZBP_NODE_IS_INTRUSIVE 0
#endif

namespace zbp {

using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::Node;
using torch::autograd::variable_list;

using NodePtr = decltype(Edge::function);

/// Whether a Python Function's context can ask for the buffers in which the engine adds up its
/// inputs' gradients.
constexpr bool CONTEXTS_ASK_FOR_BUFFERS =
    TORCH_VERSION_MAJOR > 2 || (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 15);

/// A new owning reference to a node that somebody owns already.
inline NodePtr ref_of(Node& node) {
  return node.getptr();
}

#if ZBP_NODE_IS_INTRUSIVE

template <class T>
using NodeRef = c10::intrusive_ptr<T>;

template <class T, class... Args>
NodeRef<T> make_node(Args&&... args) {
  return c10::make_intrusive<T>(std::forward<Args>(args)...);
}

/// A new reference to a node that may be dying: null if it is.
inline NodePtr lock_node(Node& node) {
  auto weak = c10::weak_intrusive_ptr<Node>::reclaim(&node);
  NodePtr strong = weak.lock();
  weak.release();
  return strong;
}

template <class T>
NodeRef<T> ref_as(Node& node) {
  return NodeRef<T>::reclaim_copy(static_cast<T*>(&node));
}

/// The node behind a Python autograd Function's context.
template <class Cdata>
NodePtr lock_py_node(const Cdata& cdata) {
  return cdata;
}

/// The Python object that stands for the node, if one was made; borrowed. It owns the node; the
/// node owns it as long as others hold the node too.
inline PyObject* python_object_of(Node& node) {
  return node.pyobj_slot()->load_pyobj();
}
constexpr bool NODES_KEEP_PYTHON_OBJECTS = true;

#else

template <class T>
using NodeRef = std::shared_ptr<T>;

// deleteNode is libtorch's own iterative deleter: without it a deep graph is freed recursively.
template <class T, class... Args>
NodeRef<T> make_node(Args&&... args) {
  return NodeRef<T>(new T(std::forward<Args>(args)...), torch::autograd::deleteNode);
}

inline NodePtr lock_node(Node& node) {
  return node.weak_from_this().lock();
}

template <class T>
NodeRef<T> ref_as(Node& node) {
  return std::static_pointer_cast<T>(node.getptr());
}

template <class Cdata>
NodePtr lock_py_node(const Cdata& cdata) {
  return cdata.lock();
}

/// Likewise. It owns the node, which never owns it; but a Python Function's is owned by its node,
/// which it does not own.
inline PyObject* python_object_of(Node& node) {
  return node.pyobj();
}
constexpr bool NODES_KEEP_PYTHON_OBJECTS = false;

#endif

/// Whether a graph of the device's is captured on the stream. A torch that cannot tell (2.11) says
/// false; so does a device that has no graphs, of which torch 2.12 raises "Backend doesn't support
/// stream capture query".
template <class Device>
auto is_capturing(const Device& device, c10::Stream stream, int /*preferred*/)
    -> decltype(device.isStreamCapturing(stream)) {
  try {
    return device.isStreamCapturing(stream);
  } catch (const c10::Error&) {
    if (stream.device_type() == c10::DeviceType::CUDA) {
      throw;
    }
    return false;
  }
}
template <class Device>
bool is_capturing(const Device& /*device*/, c10::Stream /*stream*/, long /*otherwise*/) {
  return false;
}

/// Node keeps the parts that a stand-in needs protected. A pointer to member that is named through
/// a derived class is the sanctioned way to reach them; this struct is never instantiated.
struct NodeParts : Node {
  static variable_list apply_to(Node& node, variable_list&& grads) {
    constexpr auto fn = static_cast<variable_list (Node::*)(variable_list&&)>(&NodeParts::apply);
    return (node.*fn)(std::move(grads));
  }

  /// Copies what the engine reads of a node: the metadata of its inputs and its forward thread.
  static void copy_identity(const Node& from, Node& to) {
    for (const auto& metadata : from.*(&NodeParts::input_metadata_)) {
      (to.*(&NodeParts::input_metadata_)).emplace_back(metadata);
    }
    to.*(&NodeParts::thread_id_) = from.*(&NodeParts::thread_id_);
  }

  static void swap_anomaly_metadata(Node& a, Node& b) {
    std::swap(a.*(&NodeParts::anomaly_metadata_), b.*(&NodeParts::anomaly_metadata_));
  }

  /// Null if there is none.
  static const torch::autograd::AnomalyMetadata* anomaly_of(const Node& node) {
    return (node.*(&NodeParts::anomaly_metadata_)).get();
  }

  static std::mutex& mutex_of(Node& node) { return node.*(&NodeParts::mutex_); }
};

}  // namespace zbp
