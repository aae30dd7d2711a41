#include "engine/log.hpp"

#include <ggml-backend.h>
#include <llama.h>
#include <pthread.h>

#include <deque>
#include <mutex>

namespace llamatap {

namespace {

constexpr size_t kMaxLines = 4096;

thread_local LogScope* current_scope = nullptr;
thread_local int mutes = 0;
// The engine writes a line in pieces; a thread has at most one open line.
thread_local std::string open_line;
thread_local LogLevel open_level = LogLevel::info;

}  // namespace

struct LogSink {
  std::mutex mutex;
  std::deque<LogLine> lines;

  void take(LogLevel level, std::string text) {
    if (mutes > 0) return;
    if (current_scope != nullptr && (level == LogLevel::error || level == LogLevel::warning)) {
      auto& collected = current_scope->text_;
      if (!collected.empty()) collected += "; ";
      collected += text;
    }
    const std::lock_guard<std::mutex> lock(mutex);
    if (lines.size() == kMaxLines) lines.pop_front();
    lines.push_back({level, std::move(text)});
  }

  static LogSink& instance() {
    // Never destroyed: the engine may log from static destructors.
    static auto* sink = new LogSink;
    return *sink;
  }

  static void on_log(ggml_log_level level, const char* text, void*) noexcept try {
    if (level != GGML_LOG_LEVEL_CONT) {
      open_line.clear();
      open_level = level == GGML_LOG_LEVEL_ERROR  ? LogLevel::error
                   : level == GGML_LOG_LEVEL_WARN ? LogLevel::warning
                   : level == GGML_LOG_LEVEL_INFO ? LogLevel::info
                                                  : LogLevel::debug;
    }
    open_line += text;
    if (!open_line.empty() && open_line.back() == '\n') {
      open_line.pop_back();
      instance().take(open_level, std::move(open_line));
      open_line.clear();
    }
  } catch (...) {
    // A lost log line must not end the process.
  }
};

void install_log_sink() {
  llama_log_set(&LogSink::on_log, nullptr);
  // A fork while another thread logs would leave the child with a locked mutex.
  static const auto unlock = [] { LogSink::instance().mutex.unlock(); };
  pthread_atfork([] { LogSink::instance().mutex.lock(); }, unlock, unlock);
}

std::vector<LogLine> drain_log() {
  auto& sink = LogSink::instance();
  const std::lock_guard<std::mutex> lock(sink.mutex);
  std::vector<LogLine> lines(std::make_move_iterator(sink.lines.begin()),
                             std::make_move_iterator(sink.lines.end()));
  sink.lines.clear();
  return lines;
}

LogScope::LogScope() : outer_(current_scope) { current_scope = this; }

LogScope::~LogScope() { current_scope = outer_; }

LogMute::LogMute() { ++mutes; }

LogMute::~LogMute() { --mutes; }

}  // namespace llamatap
