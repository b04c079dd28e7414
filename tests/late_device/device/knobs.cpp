// What tests turn and read, by ctypes.

#include <string>

#include "backend.h"

using namespace late;

extern "C" {

void late_set_order(int order, uint64_t seed) {
  Schedule::get().set_order(static_cast<Order>(order), seed);
}

void late_delay(int device, int64_t stream, bool is_delayed) {
  Schedule::get().delay(stream_number(device, stream), is_delayed);
}

/// The races found so far, a line each; the text is good until the next call.
const char* late_races() {
  static std::string text;
  text = Schedule::get().races();
  return text.c_str();
}

void late_forget() {
  Schedule::get().forget();
}

/// The n-th wait that zbpipe asks for from now on is left out; -1: none.
void late_drop_wait(int64_t n) {
  waits_of_zbpipe = {0, n};
  needless_waits = {};
}

int64_t late_waits() {
  return waits_of_zbpipe.seen;
}

/// Of these, how many ordered nothing that was not ordered before.
int64_t late_needless_waits() {
  return needless_waits.seen;
}

/// The n-th time that memory is said to be used on a stream is left out.
void late_drop_record(int64_t n) {
  records = {0, n};
}

int64_t late_records() {
  return records.seen;
}

uint64_t late_pending() {
  return Schedule::get().pending();
}

uint64_t late_bytes() {
  return Schedule::get().bytes;
}

uint64_t late_peak() {
  return Schedule::get().peak;
}

void late_set_capturing(int device, int64_t stream, bool is_capturing) {
  set_capturing(stream_number(device, stream), is_capturing);
}
}
