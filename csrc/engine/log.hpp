#pragma once

#include <string>
#include <vector>

namespace llamatap {

enum class LogLevel { debug, info, warning, error };

struct LogLine {
  LogLevel level;
  std::string text;
};

/// Sends the engine's log lines to a bounded buffer of this process instead of stderr. The engine
/// logs from inside calls that must not take the GIL, so lines wait here until `drain_log`.
void install_log_sink();

/// The lines that have gathered since the last call, oldest first.
std::vector<LogLine> drain_log();

/// Collects the errors and warnings that the engine logs on this thread while it lives, so that an
/// exception can say what the engine said. Scopes nest.
class LogScope {
 public:
  LogScope();
  ~LogScope();
  LogScope(const LogScope&) = delete;
  LogScope& operator=(const LogScope&) = delete;

  /// The collected lines, joined; empty when there were none.
  const std::string& text() const { return text_; }

 private:
  friend struct LogSink;
  LogScope* outer_;
  std::string text_;
};

/// While it lives, what the engine logs on this thread is dropped. Scopes nest.
class LogMute {
 public:
  LogMute();
  ~LogMute();
  LogMute(const LogMute&) = delete;
  LogMute& operator=(const LogMute&) = delete;
};

}  // namespace llamatap
