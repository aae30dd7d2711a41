#pragma once

#include <string>
#include <vector>

namespace llamatap {

enum class LogLevel { debug, info, warning, error };

struct LogLine {
  LogLevel level;
  std::string text;
};

/// Redirects the engine's log from stderr to a bounded buffer: calls that log must not take the GIL, so lines
/// are kept until drain_log().
void install_log_sink();

/// Lines since the last call, oldest first.
std::vector<LogLine> drain_log();

/// While it lives, collects the engine's errors and warnings on this thread, for exception messages. Scopes
/// nest.
class LogScope {
 public:
  LogScope();
  ~LogScope();
  LogScope(const LogScope&) = delete;
  LogScope& operator=(const LogScope&) = delete;

  /// The collected lines, joined.
  const std::string& text() const { return text_; }
  /// The collected lines, or a note that there are none.
  std::string reason() const { return text_.empty() ? "the engine gave no reason" : text_; }

 private:
  friend struct LogSink;
  LogScope* outer_;
  std::string text_;
};

/// While it lives, drops the engine's log lines on this thread. Scopes nest.
class LogMute {
 public:
  LogMute();
  ~LogMute();
  LogMute(const LogMute&) = delete;
  LogMute& operator=(const LogMute&) = delete;
};

}  // namespace llamatap
