// Types whose type information libtorch hides: no cast can ask for them, so they are told by name.
#pragma once

#include <string_view>
#include <type_traits>
#include <typeinfo>

namespace zbp {

/// T's mangled name, read off that of a function which takes a T: "FvR", T, "E". So a class that
/// torch has renamed does not compile.
template <class T>
std::string_view name_of() {
  const std::string_view function = typeid(void(std::remove_const_t<T>&)).name();
  return function.substr(3, function.size() - 4);
}

/// `object` as a T if it is exactly one.
template <class T, class Object>
T* as_hidden(Object& object) {
  return typeid(object).name() == name_of<T>() ? static_cast<T*>(&object) : nullptr;
}

/// True if the name of its type is T's but for T's `end`.
template <class T, class Object>
bool is_like(const Object& object, std::string_view end) {
  std::string_view begin = name_of<T>();
  begin.remove_suffix(end.size());
  return std::string_view(typeid(object).name()).substr(0, begin.size()) == begin;
}

}  // namespace zbp
