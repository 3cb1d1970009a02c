// Embeds tokens by the bundle's ONNX model, in C++:
//   g++ -std=c++17 -O2 embed.cpp -o embed $(pkg-config --cflags --libs libonnxruntime)
//   ./embed BUNDLE < TOKENS
// where a line of TOKENS holds the token numbers of a sentence, as the tokenizer gives them without padding. Prints a
// line of numbers per sentence. ONNX Runtime finds the weights in the bundle's safetensors files by itself.

#include <onnxruntime_cxx_api.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <exception>
#include <iostream>
#include <iterator>
#include <limits>
#include <sstream>
#include <string>
#include <vector>

using Sentences = std::vector<std::vector<int64_t>>;

Sentences read_sentences(std::istream &stream) {
  Sentences sentences;
  for (std::string line; std::getline(stream, line);) {
    std::istringstream numbers(line);
    sentences.emplace_back(std::istream_iterator<int64_t>(numbers), std::istream_iterator<int64_t>());
  }
  return sentences;
}

int main(int argc, char **argv) try {
  if (argc != 2) {
    std::cerr << "usage: embed BUNDLE < TOKENS\n";
    return 2;
  }
  const Sentences sentences = read_sentences(std::cin);
  size_t width = 0;
  for (const auto &sentence : sentences) width = std::max(width, sentence.size());

  // Every sentence is padded to the longest; the mask says where it ends.
  std::vector<int64_t> input_ids(sentences.size() * width, 0), attention_mask(input_ids.size(), 0);
  for (size_t row = 0; row < sentences.size(); ++row) {
    std::copy(sentences[row].begin(), sentences[row].end(), input_ids.begin() + row * width);
    std::fill_n(attention_mask.begin() + row * width, sentences[row].size(), 1);
  }

  Ort::Env env;
  Ort::Session session(env, (std::string(argv[1]) + "/model.onnx").c_str(), Ort::SessionOptions());

  const std::array<int64_t, 2> shape{static_cast<int64_t>(sentences.size()), static_cast<int64_t>(width)};
  const auto memory = Ort::MemoryInfo::CreateCpu(OrtArenaAllocator, OrtMemTypeDefault);
  const auto tensor = [&](std::vector<int64_t> &numbers) {
    return Ort::Value::CreateTensor<int64_t>(memory, numbers.data(), numbers.size(), shape.data(), shape.size());
  };
  const std::array<const char *, 2> inputs{"input_ids", "attention_mask"};
  const std::array<Ort::Value, 2> values{tensor(input_ids), tensor(attention_mask)};
  const char *output = "output";
  const auto results = session.Run(Ort::RunOptions(), inputs.data(), values.data(), values.size(), &output, 1);

  const float *embeddings = results[0].GetTensorData<float>();
  const auto dims = results[0].GetTensorTypeAndShapeInfo().GetShape();
  std::cout.precision(std::numeric_limits<float>::max_digits10);
  for (int64_t row = 0; row < dims[0]; ++row) {
    for (int64_t column = 0; column < dims[1]; ++column)
      std::cout << (column ? " " : "") << embeddings[row * dims[1] + column];
    std::cout << '\n';
  }
} catch (const std::exception &error) {
  std::cerr << "embed: " << error.what() << '\n';
  return 1;
}
