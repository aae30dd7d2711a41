// quantize SOURCE TARGET FILE_TYPE: a GGUF file of another type (a number of enum llama_ftype), by the
// engine.
#include <llama.h>

#include <cstdio>
#include <cstdlib>

int main(int argc, char** argv) {
  if (argc != 4) {
    std::fprintf(stderr, "usage: quantize SOURCE TARGET FILE_TYPE\n");
    return 2;
  }
  llama_log_set(
      [](ggml_log_level level, const char* text, void*) {
        if (level >= GGML_LOG_LEVEL_ERROR && level != GGML_LOG_LEVEL_CONT) std::fputs(text, stderr);
      },
      nullptr);
  llama_model_quantize_params params = llama_model_quantize_default_params();
  params.nthread = 2;
  params.ftype = static_cast<llama_ftype>(std::atoi(argv[3]));
  return llama_model_quantize(argv[1], argv[2], &params) == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
