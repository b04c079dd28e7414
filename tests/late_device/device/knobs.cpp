// What tests turn and read, by ctypes.

#include <exception>
#include <string>

#include "backend.h"

using namespace late;

extern "C" {

void late_set_order(int order, uint64_t seed) {
  Schedule::get().set_order(static_cast<Order>(order), seed);
}

void late_separate_hosts() {
  Schedule::get().separate_hosts();
}

/// The races found so far, a line each; the text is good until the next call.
const char* late_races() {
  static std::string text;
  text = Schedule::get().races();
  return text.c_str();
}

/// What was found and planted, and, if nothing is under way, the streams: new ones will have their numbers.
void late_forget() {
  faults = {};
  take_calls();
  Schedule::get().forget();
}

/// From now on: of what zbpipe waits for (0: its caller for the tasks, 1: tasks for its caller, 2: both), the n-th is left
/// out; -1: all, -2: none.
void late_drop_waits(int wait, int64_t n) {
  faults.wait = static_cast<Wait>(wait);
  faults.waits = {n, 0};
}

/// The n-th time that memory is said to be used on a stream is left out; -1: always, -2: never.
void late_drop_records(int64_t n) {
  faults.records = {n, 0};
}

int64_t late_waits() {
  return faults.waits_seen;
}

/// The memory goes to somebody else, on its own stream, though it is still in use.
void late_give_away(uint64_t data) {
  Schedule::get().give_away(data);
}

uint64_t late_bytes() {
  return Schedule::get().bytes;
}

/// A line each: what is called, whether by zbpipe, and the two streams' numbers on their devices.
const char* late_take_calls() {
  static std::string text;
  text.clear();
  for (const EventCall& call : take_calls()) {
    text += std::string(1, call.what) + (call.is_zbpipes ? " 1 " : " 0 ") +
            std::to_string(call.from) + " " + std::to_string(call.to) + "\n";
  }
  return text.c_str();
}

int64_t late_host_waits() {
  return Schedule::get().host_waits;
}

/// Of the current stream.
void late_begin_capture() {
  Schedule::get().begin_capture(current_stream(current_device()));
}

/// False if a stream has not come back.
bool late_end_capture() {
  try {
    Schedule::get().end_capture();
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

void late_replay() {
  Schedule::get().replay(current_stream(current_device()));
}

void late_set_capturing(int device, int64_t stream, bool is_capturing) {
  set_capturing(stream_number(device, stream), is_capturing);
}
}
