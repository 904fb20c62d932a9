// What an SDK does with the C ABI, and what it should not do. Prints one line for each failed check.

#include "qhexrt/qhexrt_c.h"

#include <algorithm>
#include <atomic>
#include <climits>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <iterator>
#include <random>
#include <string>
#include <thread>
#include <vector>

#ifdef __SANITIZE_ADDRESS__
// What loads plugins forgets the path of each file that it has opened.
extern "C" const char *__lsan_default_suppressions() { return "leak:abi_stable::library\n"; }
#endif

static std::atomic<int> passed{0}, failed{0};

#define CHECK(condition)                                                                \
    do {                                                                                \
        if (condition) {                                                                \
            ++passed;                                                                   \
        } else {                                                                        \
            ++failed;                                                                   \
            std::fprintf(stderr, "line %d: %s: %s\n", __LINE__, #condition, last().c_str()); \
        }                                                                               \
    } while (false)

static qhx_error last_error() {
    qhx_error error{};
    error.struct_size = sizeof error;
    qhx_last_error(&error);
    return error;
}

static std::string last() {
    const qhx_error error = last_error();
    return std::string(error.kind) + ": " + error.message;
}

static bool is_utf8(const char *text, int len) {
    for (int i = 0; i < len;) {
        const auto byte = static_cast<unsigned char>(text[i]);
        const int more = byte < 0x80 ? 0 : byte >> 5 == 6 ? 1 : byte >> 4 == 14 ? 2 : byte >> 3 == 30 ? 3 : -1;
        if (more < 0 || i + more >= len) return false;
        for (int k = 1; k <= more; ++k)
            if ((static_cast<unsigned char>(text[i + k]) & 0xc0) != 0x80) return false;
        i += more + 1;
    }
    return true;
}

// What a callback saw; `on_text` is called with the number of the text, from 1.
struct Seen {
    std::string text;
    int texts = 0, finals = 0;
    bool whole = true, same_thread = true, ordered = true;
    std::thread::id thread = std::this_thread::get_id();
    std::function<int(int)> on_text;
};

static int on_token(void *user, const char *utf8, int len, int id, int is_final) {
    auto &seen = *static_cast<Seen *>(user);
    seen.same_thread &= std::this_thread::get_id() == seen.thread;
    seen.ordered &= seen.finals == 0;
    if (is_final) {
        ++seen.finals;
        seen.ordered &= len == 0 && id == -1;
        return 1;
    }
    seen.whole &= is_utf8(utf8, len) && utf8[len] == 0;
    seen.text.append(utf8, static_cast<size_t>(len));
    ++seen.texts;
    return seen.on_text ? seen.on_text(seen.texts) : 1;
}

// Cancels at the `at`th question.
struct Asked {
    int at, count = 0;
};

static int should_cancel(void *user) {
    // A struct that ends between the function and this has none.
    if (!user) return 0;
    auto &asked = *static_cast<Asked *>(user);
    return ++asked.count >= asked.at;
}

static qhx_gen_cfg config(int max_new) {
    qhx_gen_cfg cfg;
    qhx_gen_cfg_default(&cfg);
    cfg.max_new_tokens = max_new;
    return cfg;
}

// The default options, with fields that came later.
static qhx_generate_options whole_options() {
    qhx_generate_options options{};
    qhx_generate_options_default(&options);
    options.struct_size = sizeof options;
    return options;
}

static qhx_inputs completion(const char *text) {
    qhx_inputs inputs{};
    inputs.text = text;
    inputs.no_template = 1;
    return inputs;
}

static qhx_runtime *runtime_with(const char *plugins) {
    qhx_runtime_options options;
    qhx_runtime_options_default(&options);
    options.plugins = plugins;
    options.threads = 1;
    return qhx_runtime_create_ex(&options);
}

// Text, stream, cancellation, stop strings, history.
static void language(qhx_model *model, const char *prompt, const std::string &expected) {
    qhx_session *session = qhx_session_create(model);
    CHECK(session);
    const int max_new = 12;
    const qhx_gen_cfg cfg = config(max_new);
    const qhx_inputs inputs = completion(prompt);
    qhx_output out{};

    Seen seen;
    CHECK(qhx_generate(session, &inputs, &cfg, on_token, &seen, &out) == QHX_OK);
    CHECK(out.text == expected);
    CHECK(seen.text == expected && seen.finals == 1 && seen.whole && seen.same_thread && seen.ordered);
    CHECK(out.n_generated > 0 && out.n_generated <= max_new && out.n_prompt > 0);
    CHECK(out.prefill_ms > 0 && out.decode_ms > 0 && out.n_text == expected.size());
    CHECK(seen.texts <= out.n_generated + 1);
    CHECK(!out.audio && !out.embedding && !out.image && out.n_embedding == 0);
    const int whole_prompt = out.n_prompt;
    CHECK(qhx_session_position(session) >= whole_prompt);
    qhx_session_reset(session);
    CHECK(qhx_session_position(session) == 0);

    // Every token has a call where that is asked for.
    qhx_generate_options options;
    qhx_generate_options_default(&options);
    CHECK(options.struct_size == offsetof(qhx_generate_options, logit_bias_tokens) && !options.should_cancel);
    options.every_token = 1;
    seen = Seen();
    CHECK(qhx_generate_ex(session, &inputs, &cfg, &options, on_token, &seen, &out) == QHX_OK);
    CHECK(seen.text == expected && seen.texts >= out.n_generated - 1);
    options.every_token = 0;

    // A callback stops.
    seen = Seen();
    seen.on_text = [](int texts) { return texts < 2; };
    CHECK(qhx_generate(session, &inputs, &cfg, on_token, &seen, &out) == QHX_OK);
    CHECK(seen.texts == 2 && seen.finals == 0 && out.text == seen.text);

    // Cancelled in the middle, from a callback and from another thread.
    for (const bool other : {false, true}) {
        seen = Seen();
        seen.on_text = [&](int texts) {
            if (texts == 2) {
                if (other)
                    std::thread([&] { qhx_session_cancel(session); }).join();
                else
                    qhx_session_cancel(session);
            }
            return 1;
        };
        CHECK(qhx_generate(session, &inputs, &cfg, on_token, &seen, &out) == QHX_ERROR_CANCELLED);
        CHECK(out.status == QHX_ERROR_CANCELLED && expected.rfind(out.text, 0) == 0 && out.text[0]);
        CHECK(seen.finals == 1 && out.n_generated < max_new && !std::strcmp(out.finish_reason, "cancelled"));
    }
    // A cancellation is of the generation under way, and reaches no later one.
    qhx_session_cancel(session);
    CHECK(qhx_generate(session, &inputs, &cfg, nullptr, nullptr, &out) == QHX_OK && out.text == expected);

    // Before any work, and within the prompt.
    qhx_session_reset(session);
    Asked asked{1};
    options.should_cancel = should_cancel;
    options.should_cancel_user = &asked;
    seen = Seen();
    CHECK(qhx_generate_ex(session, &inputs, &cfg, &options, on_token, &seen, &out) == QHX_ERROR_CANCELLED);
    CHECK(asked.count == 1 && out.n_generated == 0 && seen.texts == 0 && seen.finals == 1);
    CHECK(qhx_session_position(session) == 0);
    asked = Asked{4};
    CHECK(qhx_generate_ex(session, &inputs, &cfg, &options, nullptr, nullptr, &out) == QHX_ERROR_CANCELLED);
    CHECK(asked.count == 4 && out.n_generated == 0);
    CHECK(qhx_session_position(session) < whole_prompt);
    // Between tokens.
    asked = Asked{whole_prompt + 6};
    CHECK(qhx_generate_ex(session, &inputs, &cfg, &options, nullptr, nullptr, &out) == QHX_ERROR_CANCELLED);
    CHECK(out.n_generated > 0 && out.n_generated < max_new);
    // A struct that ends before the callback has none.
    asked = Asked{1};
    options.struct_size = offsetof(qhx_generate_options, should_cancel);
    CHECK(qhx_generate_ex(session, &inputs, &cfg, &options, nullptr, nullptr, &out) == QHX_OK);
    CHECK(asked.count == 0 && out.text == expected);

    // Stop strings and tokens.
    qhx_gen_cfg stopping = cfg;
    const std::string stop = expected.substr(expected.size() / 2, 2);
    const char *stops[] = {stop.c_str()};
    stopping.stop_strings = stops;
    stopping.n_stop_strings = 1;
    seen = Seen();
    CHECK(qhx_generate(session, &inputs, &stopping, on_token, &seen, &out) == QHX_OK);
    CHECK(out.text == expected.substr(0, expected.find(stop)) && seen.text == out.text);
    CHECK(!std::strcmp(out.finish_reason, "stop"));

    // The same seed draws the same.
    qhx_gen_cfg drawn = cfg;
    drawn.temperature = 1.5F;
    drawn.seed = 7;
    CHECK(qhx_generate(session, &inputs, &drawn, nullptr, nullptr, &out) == QHX_OK);
    const std::string first = out.text;
    CHECK(qhx_generate(session, &inputs, &drawn, nullptr, nullptr, &out) == QHX_OK && out.text == first);
    qhx_session_free(session);
}

// A conversation, whose state is used by the next turn.
static void conversation(qhx_model *model) {
    qhx_session *session = qhx_session_create(model);
    const qhx_gen_cfg cfg = config(4);
    qhx_inputs inputs{};
    inputs.system_prompt = "Be brief.";
    inputs.text = "Hello";
    qhx_output out{};
    CHECK(qhx_generate(session, &inputs, &cfg, nullptr, nullptr, &out) == QHX_OK);
    const std::string answer = out.text;
    const int turn = out.n_prompt;
    const char *history[] = {"Hello", answer.c_str()};
    inputs.history = history;
    inputs.n_history = 2;
    // Without a question the model goes on with the answer.
    inputs.text = nullptr;
    CHECK(qhx_generate(session, &inputs, &cfg, nullptr, nullptr, &out) == QHX_OK);
    const std::string whole = answer + out.text;
    inputs.n_history = 0;
    inputs.text = "Hello";
    const qhx_gen_cfg longer = config(8);
    CHECK(qhx_generate(session, &inputs, &longer, nullptr, nullptr, &out) == QHX_OK);
    CHECK(out.text == whole);
    inputs.n_history = 2;
    inputs.text = "And?";
    CHECK(qhx_generate(session, &inputs, &cfg, nullptr, nullptr, &out) == QHX_OK);
    CHECK(out.n_prompt > turn && out.n_reused > 0);
    qhx_generate_options options = whole_options();
    options.disable_thinking = 1;
    CHECK(qhx_generate_ex(session, &inputs, &cfg, &options, nullptr, nullptr, &out) == QHX_OK);
    inputs.no_template = 1;
    CHECK(qhx_generate(session, &inputs, &cfg, nullptr, nullptr, &out) == QHX_ERROR_USAGE);
    qhx_session_free(session);
}

// Log-probabilities of the tokens, and of the likeliest in the place of each.
static void logprobs(qhx_model *model, const char *prompt) {
    qhx_session *session = qhx_session_create(model);
    const qhx_gen_cfg cfg = config(3);
    const qhx_inputs inputs = completion(prompt);
    qhx_output out{};
    CHECK(qhx_generate(session, &inputs, &cfg, nullptr, nullptr, &out) == QHX_OK);
    CHECK(out.tokens && !out.logprobs && !out.top_tokens && !out.top_logprobs && out.n_top == 0);
    const std::vector<int32_t> tokens(out.tokens, out.tokens + out.n_generated);
    qhx_generate_options options = whole_options();
    options.logprobs = 1;
    CHECK(qhx_generate_ex(session, &inputs, &cfg, &options, nullptr, nullptr, &out) == QHX_OK);
    CHECK(out.logprobs && !out.top_tokens && std::equal(tokens.begin(), tokens.end(), out.tokens));
    options.top_logprobs = 5;
    CHECK(qhx_generate_ex(session, &inputs, &cfg, &options, nullptr, nullptr, &out) == QHX_OK);
    CHECK(out.n_generated == 3 && out.n_top == 5);
    for (int i = 0; i < out.n_generated; ++i) {
        const float *top = out.top_logprobs + 5 * i;
        // The most likely token is what was taken.
        CHECK(out.top_tokens[5 * i] == out.tokens[i] && top[0] == out.logprobs[i]);
        CHECK(top[0] < 0 && std::is_sorted(top, top + 5, std::greater<float>()));
    }
    for (int top : {-1, 129}) {
        options.top_logprobs = top;
        CHECK(qhx_generate_ex(session, &inputs, &cfg, &options, nullptr, nullptr, &out) == QHX_ERROR_USAGE);
    }
    // A caller of before knows no such field.
    options.struct_size = offsetof(qhx_generate_options, logprobs);
    CHECK(qhx_generate_ex(session, &inputs, &cfg, &options, nullptr, nullptr, &out) == QHX_OK && !out.logprobs);
    qhx_session_free(session);
}

// Why an answer ended, and by which stop string.
static void stops(qhx_model *model, const char *prompt, const std::string &expected) {
    qhx_session *session = qhx_session_create(model);
    const char *reason = "", *text = "";
    const auto ended = [&](const char *why, const char *by) {
        const bool known = qhx_session_last_stop(session, &reason, &text) == QHX_OK;
        const auto same = [](const char *a, const char *b) { return a && b ? !std::strcmp(a, b) : a == b; };
        return known && same(reason, why) && same(text, by);
    };
    CHECK(ended(nullptr, nullptr));
    qhx_gen_cfg cfg = config(12);
    const qhx_inputs inputs = completion(prompt);
    const std::string stop = expected.substr(expected.size() / 2, 2);
    const char *strings[] = {"nowhere", stop.c_str()};
    cfg.stop_strings = strings;
    cfg.n_stop_strings = 2;
    Seen seen;
    seen.on_text = [&](int) {
        CHECK(qhx_session_last_stop(session, &reason, &text) == QHX_ERROR_BUSY && !reason && !text);
        return 1;
    };
    CHECK(qhx_generate(session, &inputs, &cfg, on_token, &seen, nullptr) == QHX_OK && ended("stop", stop.c_str()));
    CHECK(qhx_session_last_stop(session, nullptr, nullptr) == QHX_OK);
    CHECK(qhx_session_last_n_words(session) == 0);
    cfg.n_stop_strings = 1;
    CHECK(qhx_generate(session, &inputs, &cfg, nullptr, nullptr, nullptr) == QHX_OK && ended("length", nullptr));
    seen.on_text = [](int) { return 0; };
    CHECK(qhx_generate(session, &inputs, &cfg, on_token, &seen, nullptr) == QHX_OK && ended("stop", nullptr));
    qhx_session_reset(session);
    CHECK(ended(nullptr, nullptr));
    qhx_session_free(session);
    CHECK(qhx_session_last_stop(session, &reason, &text) == QHX_ERROR_HANDLE);
}

// Tokens that are made less likely.
static void biases(qhx_model *model, const char *prompt) {
    qhx_session *session = qhx_session_create(model);
    const qhx_gen_cfg cfg = config(1);
    const qhx_inputs inputs = completion(prompt);
    qhx_output out{};
    qhx_generate_options options = whole_options();
    options.top_logprobs = 3;
    CHECK(qhx_generate_ex(session, &inputs, &cfg, &options, nullptr, nullptr, &out) == QHX_OK);
    const std::vector<int32_t> likely(out.top_tokens, out.top_tokens + 3);
    const float excluded[] = {-100.0F, -100.0F};
    options.logit_bias_tokens = likely.data();
    options.logit_biases = excluded;
    options.n_logit_bias = 2;
    CHECK(qhx_generate_ex(session, &inputs, &cfg, &options, nullptr, nullptr, &out) == QHX_OK);
    CHECK(out.tokens[0] == likely[2]);
    const auto refused = [&](const char *words) {
        const bool usage = qhx_generate_ex(session, &inputs, &cfg, &options, nullptr, nullptr, &out) == QHX_ERROR_USAGE;
        return usage && last().find(words) != std::string::npos;
    };
    const float beyond[] = {101.0F, 0.0F};
    options.logit_biases = beyond;
    CHECK(refused("logit_bias of token"));
    const int32_t unknown[] = {-1, 1 << 30};
    options.logit_biases = excluded;
    options.logit_bias_tokens = unknown;
    CHECK(refused("logit_bias_tokens: -1"));
    options.logit_bias_tokens = unknown + 1;
    options.n_logit_bias = 1;
    CHECK(refused("outside the model's vocabulary"));
    options.logit_biases = nullptr;
    CHECK(refused("logit_biases: 1 entries at NULL"));
    options.n_logit_bias = -1;
    CHECK(refused("-1 entries"));
    // A caller of 1.0 has no such fields.
    options.struct_size = offsetof(qhx_generate_options, logit_bias_tokens);
    CHECK(qhx_generate_ex(session, &inputs, &cfg, &options, nullptr, nullptr, &out) == QHX_OK);
    CHECK(out.tokens[0] == likely[0]);
    qhx_session_free(session);
}

// What one user's prompts left is not gone on from by another's.
static void salts(qhx_model *model, const char *prompt) {
    qhx_session *session = qhx_session_create(model);
    const qhx_gen_cfg cfg = config(1);
    const qhx_inputs inputs = completion(prompt);
    qhx_output out{};
    qhx_generate_options options = whole_options();
    const auto reused = [&](const char *salt) {
        options.cache_salt = salt;
        CHECK(qhx_generate_ex(session, &inputs, &cfg, &options, nullptr, nullptr, &out) == QHX_OK);
        return out.n_reused;
    };
    CHECK(reused("one") == 0 && reused("one") > 0 && reused("two") == 0 && reused("two") > 0);
    CHECK(reused(nullptr) == 0 && reused(nullptr) > 0);
    for (const char *salt : {"", "\xff"}) {
        options.cache_salt = salt;
        CHECK(qhx_generate_ex(session, &inputs, &cfg, &options, nullptr, nullptr, &out) == QHX_ERROR_USAGE);
        CHECK(last().find("cache_salt") != std::string::npos);
    }
    options.cache_salt = nullptr;
    options.word_times = 1;
    CHECK(qhx_generate_ex(session, &inputs, &cfg, &options, nullptr, nullptr, &out) == QHX_ERROR_USAGE);
    CHECK(last().find("word_times") != std::string::npos);
    options.word_times = 0;
    options.vad = "{}";
    CHECK(qhx_generate_ex(session, &inputs, &cfg, &options, nullptr, nullptr, &out) == QHX_ERROR_USAGE);
    CHECK(last().find("vad") != std::string::npos);
    qhx_session_free(session);
}

// When the words of a clip are said: a text, a beginning and an end for each.
static void words(qhx_model *model, const char *clip, char **expected, int count) {
    qhx_session *session = qhx_session_create(model);
    qhx_media media{};
    media.kind = QHX_MEDIA_AUDIO;
    media.path = clip;
    qhx_generate_options options = whole_options();
    options.media = &media;
    options.n_media = 1;
    options.word_times = 1;
    options.cache_salt = "one";
    const qhx_inputs inputs{};
    qhx_output out{};
    CHECK(qhx_generate_ex(session, &inputs, nullptr, &options, nullptr, nullptr, &out) == QHX_OK && out.text[0]);
    CHECK(count > 1 && qhx_session_last_n_words(session) == count);
    const char *text = nullptr;
    double start = 0, end = 0;
    for (int i = 0; i < count; ++i, expected += 3) {
        CHECK(qhx_session_last_word(session, i, &text, &start, &end) == QHX_OK && !std::strcmp(text, expected[0]));
        CHECK(std::abs(start - std::atof(expected[1])) < 1e-3 && std::abs(end - std::atof(expected[2])) < 1e-3);
    }
    CHECK(qhx_session_last_word(session, 0, nullptr, nullptr, nullptr) == QHX_OK);
    for (const int index : {-1, count})
        CHECK(qhx_session_last_word(session, index, &text, &start, &end) == QHX_ERROR_USAGE && !text);
    options.word_times = 0;
    CHECK(qhx_generate_ex(session, &inputs, nullptr, &options, nullptr, nullptr, &out) == QHX_OK);
    CHECK(qhx_session_last_n_words(session) == 0);
    // Nobody speaks: the clips of the tiny model are chords.
    options.vad = "{\"threshold\": 0.9}";
    CHECK(qhx_generate_ex(session, &inputs, nullptr, &options, nullptr, nullptr, &out) == QHX_OK && !out.text[0]);
    options.vad = "{\"threshold\": 9}";
    CHECK(qhx_generate_ex(session, &inputs, nullptr, &options, nullptr, nullptr, &out) == QHX_ERROR_USAGE);
    CHECK(last().find("threshold of speech: 9") != std::string::npos);
    qhx_session_free(session);
    CHECK(qhx_session_last_n_words(session) == -1 && last_error().status == QHX_ERROR_HANDLE);
}

// The second half of a greedy answer: after the prompt and the first half, from a state or not.
static std::string goes_on(qhx_session *session, const int32_t *tokens, int count, int max_new, qhx_output *out) {
    qhx_generate_options options = whole_options();
    options.tokens = tokens;
    options.n_tokens = count;
    const qhx_gen_cfg cfg = config(max_new);
    const qhx_inputs inputs{};
    CHECK(qhx_generate_ex(session, &inputs, &cfg, &options, nullptr, nullptr, out) == QHX_OK);
    return out->text ? out->text : "";
}

static std::string slurp(const char *path) {
    std::ifstream file(path, std::ios::binary);
    return std::string(std::istreambuf_iterator<char>(file), {});
}

static const int32_t PROMPT[] = {1, 17, 40, 23, 31, 12, 50, 60};

// Saves a state for another process, which `restores`.
static void saves(qhx_model *model, const char *path) {
    qhx_session *session = qhx_session_create(model);
    qhx_output out{};
    const std::string first = goes_on(session, PROMPT, 7, 4, &out);
    const int64_t position = qhx_session_position(session);
    CHECK(position == 7 + out.n_generated - 1);
    const void *bytes = nullptr;
    size_t size = 0;
    CHECK(qhx_session_export(session, &bytes, &size) == QHX_OK && size > 100);
    CHECK(out.text == first);
    const std::string state(static_cast<const char *>(bytes), size);
    std::ofstream(path, std::ios::binary).write(state.data(), static_cast<std::streamsize>(size));
    // The session goes on from what it holds itself.
    qhx_session_reset(session);
    CHECK(qhx_session_export(session, &bytes, &size) == QHX_OK && size < state.size());
    CHECK(qhx_session_import(session, bytes, size) == QHX_OK && qhx_session_position(session) == 0);
    CHECK(qhx_session_import(session, state.data(), state.size()) == QHX_OK);
    CHECK(qhx_session_position(session) == position);
    for (size_t cut : {size_t{0}, size_t{10}, state.size() / 2, state.size() - 1}) {
        CHECK(qhx_session_import(session, state.data(), cut) == QHX_ERROR_USAGE);
        CHECK(qhx_session_position(session) == position);
    }
    CHECK(last_error().status == QHX_ERROR_USAGE);
    CHECK(qhx_session_import(session, nullptr, 9) == QHX_ERROR_USAGE);
    CHECK(qhx_session_import(session, bytes, SIZE_MAX) == QHX_ERROR_USAGE);
    CHECK(qhx_session_import(nullptr, state.data(), state.size()) == QHX_ERROR_HANDLE);
    CHECK(qhx_session_export(session, nullptr, &size) == QHX_ERROR_USAGE);
    CHECK(qhx_session_export(nullptr, &bytes, &size) == QHX_ERROR_HANDLE && !bytes && size == 0);
    qhx_session_free(session);
}

// A state of another process, or of this one, goes on here.
static void restores(qhx_model *model, const char *path) {
    qhx_session *fresh = qhx_session_create(model), *session = qhx_session_create(model);
    qhx_output out{};
    const std::string expected = goes_on(fresh, PROMPT, 8, 4, &out);
    CHECK(out.n_reused == 0);
    const std::string state = slurp(path);
    CHECK(qhx_session_import(session, state.data(), state.size()) == QHX_OK);
    CHECK(qhx_session_position(session) > 7);
    CHECK(goes_on(session, PROMPT, 8, 4, &out) == expected && out.n_reused == 7);
    qhx_session_free(fresh);
    qhx_session_free(session);
}

// A state of another bundle.
static void refuses(qhx_model *model, const char *path) {
    qhx_session *session = qhx_session_create(model);
    const std::string state = slurp(path);
    CHECK(qhx_session_import(session, state.data(), state.size()) == QHX_ERROR_USAGE);
    CHECK(std::strstr(last_error().message, "host-op") || std::strstr(last_error().message, "another bundle"));
    qhx_session_free(session);
}

// Calls from within a callback, and from a second thread.
static void reentry(qhx_model *model, const char *prompt) {
    qhx_session *session = qhx_session_create(model);
    const qhx_gen_cfg cfg = config(6);
    const qhx_inputs inputs = completion(prompt);
    qhx_output out{};
    Seen seen;
    seen.on_text = [&](int texts) {
        if (texts != 1) return 1;
        qhx_output inner{};
        CHECK(qhx_generate(session, &inputs, &cfg, nullptr, nullptr, &inner) == QHX_ERROR_BUSY);
        CHECK(inner.status == QHX_ERROR_BUSY && !inner.text);
        qhx_session_reset(session);
        CHECK(last_error().status == QHX_ERROR_BUSY && !std::strcmp(last_error().kind, "busy"));
        qhx_session_free(session);
        CHECK(last_error().status == QHX_ERROR_BUSY);
        CHECK(qhx_session_position(session) == -1);
        std::thread([&] {
            CHECK(qhx_generate(session, &inputs, &cfg, nullptr, nullptr, &inner) == QHX_ERROR_BUSY);
        }).join();
        // Another session is free to run meanwhile.
        qhx_session *other = qhx_session_create(model);
        CHECK(qhx_generate(other, &inputs, &cfg, nullptr, nullptr, &inner) == QHX_OK);
        qhx_session_free(other);
        return 1;
    };
    CHECK(qhx_generate(session, &inputs, &cfg, on_token, &seen, &out) == QHX_OK);
    CHECK(qhx_generate(session, &inputs, &cfg, nullptr, nullptr, &out) == QHX_OK);

    // Freed by another thread while it generates: that waits, and the generation ends.
    std::atomic<bool> begun{false};
    std::thread generating([&] {
        Seen own;
        own.on_text = [&](int) { return begun = true, 1; };
        const qhx_gen_cfg longer = config(INT_MAX);
        qhx_output result{};
        const qhx_status status = qhx_generate(session, &inputs, &longer, on_token, &own, &result);
        CHECK(status == QHX_ERROR_CANCELLED || status == QHX_OK);
    });
    while (!begun) std::this_thread::yield();
    qhx_session_free(session);
    generating.join();
    CHECK(qhx_generate(session, &inputs, &cfg, nullptr, nullptr, &out) == QHX_ERROR_HANDLE);
}

// Two models with a session each, on two threads; a model that is freed before its session.
static void side_by_side(qhx_runtime *runtime, const char *bundle, const char *prompt, const std::string &expected) {
    auto work = [&] {
        qhx_model *model = qhx_model_load(runtime, bundle, nullptr);
        qhx_session *session = qhx_session_create(model);
        qhx_model_free(model);
        CHECK(!qhx_session_create(model));
        const qhx_gen_cfg cfg = config(12);
        const qhx_inputs inputs = completion(prompt);
        for (int i = 0; i < 2; ++i) {
            qhx_output out{};
            CHECK(qhx_generate(session, &inputs, &cfg, nullptr, nullptr, &out) == QHX_OK && out.text == expected);
        }
        qhx_session_free(session);
    };
    std::thread other(work);
    work();
    other.join();
}

// An image as a file, as bytes, and several of them; audio; tokens.
static void multimodal(qhx_model *model, const char *image) {
    qhx_session *session = qhx_session_create(model);
    const qhx_gen_cfg cfg = config(2);
    qhx_output out{};
    qhx_inputs inputs = completion("ab");
    inputs.image_path = image;
    CHECK(qhx_generate(session, &inputs, &cfg, nullptr, nullptr, &out) == QHX_OK && !std::strcmp(out.text, "rr"));

    std::ifstream file(image, std::ios::binary);
    const std::string bytes((std::istreambuf_iterator<char>(file)), {});
    inputs.image_data = bytes.data();
    inputs.image_size = bytes.size();
    CHECK(qhx_generate(session, &inputs, &cfg, nullptr, nullptr, &out) == QHX_ERROR_USAGE);
    inputs.image_path = nullptr;
    CHECK(qhx_generate(session, &inputs, &cfg, nullptr, nullptr, &out) == QHX_OK && !std::strcmp(out.text, "rr"));
    const int one = out.n_prompt;
    inputs.image_size = bytes.size() / 2;
    CHECK(qhx_generate(session, &inputs, &cfg, nullptr, nullptr, &out) != QHX_OK);

    const std::vector<float> samples(300, -0.5F);
    inputs = completion("ab");
    inputs.audio = samples.data();
    inputs.n_audio = 300;
    inputs.audio_sr = 8000;
    CHECK(qhx_generate(session, &inputs, &cfg, nullptr, nullptr, &out) == QHX_OK && !std::strcmp(out.text, "ll"));
    const int heard = out.n_prompt;
    inputs.audio_sr = 16000;
    CHECK(qhx_generate(session, &inputs, &cfg, nullptr, nullptr, &out) == QHX_OK && out.n_prompt < heard);
    // By the chat template, and without a text.
    inputs.no_template = 0;
    CHECK(qhx_generate(session, &inputs, &cfg, nullptr, nullptr, &out) == QHX_OK);
    inputs.text = nullptr;
    CHECK(qhx_generate(session, &inputs, &cfg, nullptr, nullptr, &out) == QHX_OK);
    for (const int rate : {0, -1}) {
        inputs.audio_sr = rate;
        CHECK(qhx_generate(session, &inputs, &cfg, nullptr, nullptr, &out) == QHX_ERROR_USAGE);
    }
    const float broken[] = {0.0F, NAN};
    inputs.audio = broken;
    inputs.n_audio = 2;
    inputs.audio_sr = 8000;
    CHECK(qhx_generate(session, &inputs, &cfg, nullptr, nullptr, &out) != QHX_OK);

    qhx_media media[2] = {};
    media[0].kind = media[1].kind = QHX_MEDIA_IMAGE;
    media[0].path = image;
    media[1].data = bytes.data();
    media[1].size = bytes.size();
    qhx_generate_options options = whole_options();
    options.media = media;
    options.n_media = 2;
    inputs = completion("a<image>b<image>");
    CHECK(qhx_generate_ex(session, &inputs, &cfg, &options, nullptr, nullptr, &out) == QHX_OK);
    CHECK(out.n_prompt > one && !std::strcmp(out.text, "rr"));
    media[1].kind = 3;
    CHECK(qhx_generate_ex(session, &inputs, &cfg, &options, nullptr, nullptr, &out) == QHX_ERROR_USAGE);
    media[1].kind = QHX_MEDIA_AUDIO;
    media[1].samples = samples.data();
    CHECK(qhx_generate_ex(session, &inputs, &cfg, &options, nullptr, nullptr, &out) == QHX_ERROR_USAGE);

    options = whole_options();
    const int32_t tokens[] = {0, 1, 1};
    options.tokens = tokens;
    options.n_tokens = 3;
    inputs.text = nullptr;
    CHECK(qhx_generate_ex(session, &inputs, &cfg, &options, nullptr, nullptr, &out) == QHX_OK);
    CHECK(out.n_prompt == 3 && !std::strcmp(out.text, "bb"));
    const int32_t negative[] = {-1};
    options.tokens = negative;
    options.n_tokens = 1;
    CHECK(qhx_generate_ex(session, &inputs, &cfg, &options, nullptr, nullptr, &out) == QHX_ERROR_USAGE);
    qhx_session_free(session);
}

static void transcription(qhx_model *model) {
    qhx_session *session = qhx_session_create(model);
    const qhx_gen_cfg cfg = config(2);
    const std::vector<float> samples(150, -0.5F);
    qhx_inputs inputs{};
    inputs.audio = samples.data();
    inputs.n_audio = 150;
    inputs.audio_sr = 8000;
    qhx_output out{};
    Seen seen;
    CHECK(qhx_generate(session, &inputs, &cfg, on_token, &seen, &out) == QHX_OK);
    CHECK(!std::strcmp(out.text, "ll") && seen.text == "ll" && seen.finals == 1 && out.n_generated == 2);
    Asked asked{3};
    qhx_generate_options options = whole_options();
    options.should_cancel = should_cancel;
    options.should_cancel_user = &asked;
    CHECK(qhx_generate_ex(session, &inputs, &cfg, &options, nullptr, nullptr, &out) == QHX_ERROR_CANCELLED);
    options = whole_options();
    options.word_times = 1;
    CHECK(qhx_generate_ex(session, &inputs, &cfg, &options, nullptr, nullptr, &out) == QHX_ERROR_USAGE);
    CHECK(last().find("the model gives no times") != std::string::npos);
    qhx_session_free(session);
}

static void embedding(qhx_model *model) {
    qhx_session *session = qhx_session_create(model);
    qhx_inputs inputs{};
    inputs.text = "a text";
    qhx_output out{};
    CHECK(qhx_generate(session, &inputs, nullptr, nullptr, nullptr, &out) == QHX_OK);
    CHECK(out.n_embedding > 1 && out.n_prompt > 0 && out.n_generated == 0);
    double norm = 0;
    for (int i = 0; i < out.n_embedding; ++i) norm += static_cast<double>(out.embedding[i]) * out.embedding[i];
    CHECK(std::abs(norm - 1) < 1e-3);
    const std::vector<float> vector(out.embedding, out.embedding + out.n_embedding);
    CHECK(qhx_generate(session, &inputs, nullptr, nullptr, nullptr, &out) == QHX_OK);
    CHECK(vector == std::vector<float>(out.embedding, out.embedding + out.n_embedding));
    inputs.system_prompt = "no";
    CHECK(qhx_generate(session, &inputs, nullptr, nullptr, nullptr, &out) == QHX_ERROR_USAGE);
    CHECK(!out.embedding);
    qhx_session_free(session);
}

// What callers should not do.
static void bad_input(qhx_model *model, const char *prompt) {
    qhx_session *session = qhx_session_create(model);
    const qhx_inputs inputs = completion(prompt);
    qhx_gen_cfg cfg = config(1);
    qhx_output out{};
    int here = 0;
    auto generate = [&](const qhx_inputs *in, const qhx_gen_cfg *how) {
        return qhx_generate(session, in, how, nullptr, nullptr, &out);
    };
    CHECK(qhx_generate(session, &inputs, &cfg, nullptr, nullptr, nullptr) == QHX_OK);
    CHECK(qhx_generate(nullptr, &inputs, &cfg, nullptr, nullptr, &out) == QHX_ERROR_HANDLE);
    CHECK(out.status == QHX_ERROR_HANDLE && !std::strcmp(last_error().kind, "handle"));
    CHECK(qhx_generate(reinterpret_cast<qhx_session *>(&here), &inputs, &cfg, nullptr, nullptr, &out) == QHX_ERROR_HANDLE);
    CHECK(qhx_generate(reinterpret_cast<qhx_session *>(model), &inputs, &cfg, nullptr, nullptr, &out) == QHX_ERROR_HANDLE);
    CHECK(generate(nullptr, &cfg) == QHX_ERROR_USAGE);
    qhx_inputs none{};
    CHECK(generate(&none, &cfg) == QHX_ERROR_USAGE);
    none.no_template = 1;
    none.text = "";
    CHECK(generate(&none, &cfg) == QHX_ERROR_PROMPT);
    none.text = "a\xff" "b";
    CHECK(generate(&none, &cfg) == QHX_ERROR_USAGE && last().find("text: byte 1") != std::string::npos);
    none = inputs;
    none.mask_path = "mask.png";
    CHECK(generate(&none, &cfg) == QHX_ERROR_USAGE);

    qhx_inputs chat{};
    chat.text = "x";
    const std::vector<const char *> history(4097, "x");
    chat.history = history.data();
    for (const int count : {4097, -1, 3, INT_MAX, INT_MIN}) {
        chat.n_history = count;
        CHECK(generate(&chat, &cfg) == QHX_ERROR_USAGE);
    }
    chat.history = nullptr;
    chat.n_history = 2;
    CHECK(generate(&chat, &cfg) == QHX_ERROR_USAGE);
    const char *holes[] = {"x", nullptr};
    chat.history = holes;
    CHECK(generate(&chat, &cfg) == QHX_ERROR_USAGE && last().find("history[1] is NULL") != std::string::npos);

    const auto refuse = [&](const std::function<void(qhx_gen_cfg &)> &change) {
        qhx_gen_cfg changed = config(1);
        change(changed);
        return generate(&inputs, &changed);
    };
    CHECK(refuse([](qhx_gen_cfg &c) { c.max_new_tokens = -1; }) == QHX_ERROR_USAGE);
    CHECK(refuse([](qhx_gen_cfg &c) { c.top_k = -1; }) == QHX_ERROR_USAGE);
    CHECK(refuse([](qhx_gen_cfg &c) { c.temperature = NAN; }) == QHX_ERROR_USAGE);
    CHECK(refuse([](qhx_gen_cfg &c) { c.top_p = 2; }) == QHX_ERROR_USAGE);
    CHECK(refuse([](qhx_gen_cfg &c) { c.repetition_penalty = 0; }) == QHX_ERROR_USAGE);
    CHECK(refuse([](qhx_gen_cfg &c) { c.n_stop_strings = 1; }) == QHX_ERROR_USAGE);
    CHECK(refuse([](qhx_gen_cfg &c) { c.n_stop_token_ids = -2; }) == QHX_ERROR_USAGE);
    CHECK(refuse([](qhx_gen_cfg &c) { c.grammar_kind = 9; }) == QHX_ERROR_USAGE);

    // Answers of a grammar, by a model that would write none of them.
    const auto written = [&](const int kind, const char *grammar) -> std::string {
        qhx_gen_cfg by = config(32);
        by.grammar_kind = kind;
        by.grammar = grammar;
        return generate(&inputs, &by) == QHX_OK ? out.text : "refused: " + last();
    };
    const std::string side = written(QHX_GRAMMAR_CHOICE, "left, right");
    CHECK(side == "left" || side == "right");
    const std::string number = written(QHX_GRAMMAR_JSON, "json:{\"enum\": [12, \"x\"]}");
    CHECK(number == "12" || number == "\"x\"");
    CHECK(written(QHX_GRAMMAR_JSON, "json:{").find("no JSON") != std::string::npos);
    CHECK(written(QHX_GRAMMAR_TOOL_CALL, "[]").find("refused") == 0);

    qhx_generate_options options = whole_options();
    for (const size_t size : {size_t{0}, sizeof(size_t) - 1}) {
        options.struct_size = size;
        CHECK(qhx_generate_ex(session, &inputs, &cfg, &options, nullptr, nullptr, &out) == QHX_ERROR_USAGE);
    }
    // A later caller's struct is longer.
    options.struct_size = sizeof options + 64;
    CHECK(qhx_generate_ex(session, &inputs, &cfg, &options, nullptr, nullptr, &out) == QHX_OK);

    qhx_session_free(session);
    qhx_session_free(session);
    CHECK(last_error().status == QHX_ERROR_HANDLE);
    qhx_session_cancel(session);
    qhx_session_reset(session);
    CHECK(qhx_session_position(session) == -1);
    qhx_session_free(nullptr);
    qhx_session_reset(nullptr);
    qhx_session_cancel(nullptr);
    qhx_model_free(nullptr);
    qhx_runtime_free(nullptr);
    qhx_gen_cfg_default(nullptr);
    qhx_generate_options_default(nullptr);
    qhx_runtime_options_default(nullptr);
    CHECK(!qhx_session_create(nullptr) && !qhx_model_load(nullptr, "x", nullptr));
    CHECK(qhx_last_error(nullptr) == QHX_ERROR_USAGE);
    for (int status = -200; status < 200; ++status) CHECK(qhx_status_str(status)[0]);
    CHECK(qhx_version()[0]);
}

static void devices(qhx_runtime *runtime) {
    char arch[32] = "x";
    int soc = -1, htp = -1;
    qhx_runtime_device(runtime, arch, sizeof arch, &soc, &htp);
    const char *set = std::getenv("QHX_DEVICE_ARCH");
    CHECK(!std::strcmp(arch, set ? set : "") && soc == 0 && htp == (set ? std::atoi(set + 1) : 0));
    qhx_runtime_device(runtime, nullptr, 0, nullptr, nullptr);
    char small[2] = "x";
    qhx_runtime_device(runtime, small, 2, nullptr, nullptr);
    CHECK(std::strlen(small) < 2);
    qhx_runtime_device(nullptr, arch, sizeof arch, &soc, &htp);
    CHECK(!arch[0]);
}

struct Logged {
    std::atomic<int> messages{0};
};

static void on_log(void *user, int level, const char *target, const char *message) {
    if (level >= 1 && level <= 5 && target[0] && message) ++static_cast<Logged *>(user)->messages;
}

// The defaults go into a struct as long as that of 1.0, whatever this header has.
static void defaults() {
    const auto check = [](const auto &fill, size_t first) {
        alignas(8) unsigned char bytes[256];
        std::memset(bytes, 0xAA, sizeof bytes);
        fill(bytes);
        size_t size = 0;
        std::memcpy(&size, bytes, sizeof size);
        CHECK(size == first);
        for (size_t at = first; at < sizeof bytes; ++at) CHECK(bytes[at] == 0xAA);
    };
    check([](void *at) { qhx_generate_options_default(static_cast<qhx_generate_options *>(at)); }, 80);
    check([](void *at) { qhx_runtime_options_default(static_cast<qhx_runtime_options *>(at)); }, 80);
}

static int all(char **argv, int count) {
    const char *llm = argv[0], *prompt = argv[1], *plugins = argv[3], *mm = argv[4], *image = argv[5];
    const char *stt = argv[6], *embed = argv[7], *state = argv[8], *listening = argv[9];
    const std::string expected = argv[2];
    defaults();
    Logged logged;
    CHECK(qhx_log_set(on_log, &logged, 9) == QHX_ERROR_USAGE);
    CHECK(qhx_log_set(on_log, &logged, 3) == QHX_OK);
    // The runtime is freed, and made again.
    for (int round = 0; round < 2; ++round) {
        qhx_runtime *runtime = runtime_with(plugins);
        CHECK(runtime);
        CHECK(!qhx_runtime_create(nullptr, nullptr) && last_error().status == QHX_ERROR_BUSY);
        devices(runtime);
        CHECK(!qhx_model_load(runtime, "no such bundle", nullptr) && last_error().status == QHX_ERROR_MANIFEST);
        CHECK(!qhx_model_load(runtime, nullptr, nullptr));
        CHECK(!qhx_model_load(runtime, llm, "no such folder"));
        qhx_model *model = qhx_model_load(runtime, llm, nullptr);
        CHECK(model);
        language(model, prompt, expected);
        if (round == 0) {
            conversation(model);
            reentry(model, prompt);
            bad_input(model, prompt);
            logprobs(model, prompt);
            stops(model, prompt, expected);
            biases(model, prompt);
            salts(model, prompt);
            saves(model, state);
            restores(model, state);
            side_by_side(runtime, llm, prompt, expected);
            for (const auto &[bundle, test] : {std::pair<const char *, std::function<void(qhx_model *)>>
                     {mm, [&](qhx_model *m) { multimodal(m, image); }}, {stt, transcription}, {embed, embedding},
                     {listening, [&](qhx_model *m) { words(m, argv[10], argv + 11, count); }}}) {
                qhx_model *other = qhx_model_load(runtime, bundle, nullptr);
                CHECK(other);
                test(other);
                refuses(other, state);
                qhx_model_free(other);
            }
        }
        qhx_model_free(model);
        qhx_runtime_free(runtime);
        qhx_runtime_free(runtime);
        CHECK(last_error().status == QHX_ERROR_HANDLE);
    }
    CHECK(logged.messages > 0);
    CHECK(qhx_log_set(nullptr, nullptr, 0) == QHX_OK);
    const int before = logged.messages;
    CHECK(!qhx_model_load(nullptr, "x", nullptr) && logged.messages == before);
    qhx_runtime_options options;
    qhx_runtime_options_default(&options);
    options.backend = "gpu";
    CHECK(!qhx_runtime_create_ex(&options) && last().find("expected auto, cpu or qnn") != std::string::npos);
    options.backend = nullptr;
    options.decode_on = "gpu";
    CHECK(!qhx_runtime_create_ex(&options) && last().find("expected auto, cpu or npu") != std::string::npos);
    options.decode_on = nullptr;
    options.cpu_activations = "int4";
    CHECK(!qhx_runtime_create_ex(&options) && last().find("expected auto, int16 or int8") != std::string::npos);
    options.cpu_activations = nullptr;
    options.cpu_caches = "int4";
    CHECK(!qhx_runtime_create_ex(&options) && last().find("expected f16 or f32") != std::string::npos);
    options.cpu_caches = nullptr;
    options.device_arch = "v8x";
    CHECK(!qhx_runtime_create_ex(&options));
    options.struct_size = offsetof(qhx_runtime_options, device_arch);
    qhx_runtime *runtime = qhx_runtime_create_ex(&options);
    CHECK(runtime);
    qhx_runtime_free(runtime);
    return 0;
}

// A library that calls this one as it is loaded, while the runtime is made.
static void loading(const char *library) {
    qhx_runtime_options options;
    qhx_runtime_options_default(&options);
    options.htp = options.system = library;
    options.backend = "qnn";
    CHECK(!qhx_runtime_create_ex(&options) && last_error().status == QHX_ERROR_RUNTIME);
    // What failed is not in the way of the next one.
    options.backend = "cpu";
    qhx_runtime *runtime = qhx_runtime_create_ex(&options);
    CHECK(runtime);
    qhx_runtime_free(runtime);
}

// A host-op that panics when it is reset: the next generation opens it again.
static void resetting(const char *plugins, const char *bundle) {
    qhx_runtime *runtime = runtime_with(plugins);
    qhx_model *model = qhx_model_load(runtime, bundle, nullptr);
    CHECK(model);
    qhx_session *session = qhx_session_create(model);
    const qhx_gen_cfg cfg = config(2);
    const qhx_inputs inputs = completion("ab");
    qhx_output out{};
    CHECK(qhx_generate(session, &inputs, &cfg, nullptr, nullptr, &out) == QHX_OK);
    const std::string text = out.text;
    qhx_session_reset(session);
    CHECK(last_error().status == QHX_ERROR_PANICKED);
    CHECK(qhx_session_position(session) == 0);
    CHECK(qhx_generate(session, &inputs, &cfg, nullptr, nullptr, &out) == QHX_OK && out.text == text);
    qhx_session_free(session);
    qhx_model_free(model);
    qhx_runtime_free(runtime);
}

// Random calls, with handles that are live, freed, NULL or nobody's.
static void random_sequence(unsigned seed, const char *plugins, const char *bundle, const char *image) {
    std::mt19937 random(seed);
    auto below = [&](unsigned n) { return static_cast<int>(random() % n); };
    std::vector<qhx_runtime *> runtimes{nullptr, runtime_with(plugins)};
    std::vector<qhx_model *> models{nullptr, reinterpret_cast<qhx_model *>(&random)};
    std::vector<qhx_session *> sessions{nullptr, reinterpret_cast<qhx_session *>(&random)};
    auto any = [&](auto &list) { return list[static_cast<size_t>(below(static_cast<unsigned>(list.size())))]; };
    const float samples[] = {0.5F, -0.5F, 0.25F, 0.1F};
    const char *texts[] = {"ab", "", nullptr, "\xc3", "a<image>b", "cd"};
    const char *history[] = {"a", "b", "c", nullptr};
    std::string state;
    for (int step = 0; step < 16; ++step) {
        switch (below(12)) {
        case 0: runtimes.push_back(below(2) ? runtime_with(plugins) : qhx_runtime_create(nullptr, nullptr)); break;
        case 1: if (!below(3)) qhx_runtime_free(any(runtimes)); break;
        case 2: models.push_back(qhx_model_load(any(runtimes), bundle, nullptr)); break;
        case 3: if (!below(2)) qhx_model_free(any(models)); break;
        case 4: sessions.push_back(qhx_session_create(any(models))); break;
        case 5: if (!below(2)) qhx_session_free(any(sessions)); break;
        case 6: qhx_session_reset(any(sessions)); qhx_session_cancel(any(sessions)); break;
        case 7: {
            const void *bytes = nullptr;
            size_t size = 0;
            if (qhx_session_export(any(sessions), &bytes, &size) == QHX_OK)
                state.assign(static_cast<const char *>(bytes), size);
            break;
        }
        case 8: {
            std::string bytes = state;
            if (!bytes.empty() && !below(2)) bytes[random() % bytes.size()] ^= 1;
            if (!below(4)) bytes.resize(bytes.size() / 2);
            qhx_session_import(any(sessions), bytes.data(), bytes.size());
            break;
        }
        default: {
            qhx_session *session = any(sessions);
            qhx_inputs inputs{};
            inputs.text = texts[below(6)];
            inputs.no_template = below(2);
            if (!below(3)) { inputs.history = history; inputs.n_history = below(6) - 1; }
            if (!below(3)) inputs.image_path = below(4) ? image : bundle;
            if (!below(3)) { inputs.audio = samples; inputs.n_audio = below(6) - 1; inputs.audio_sr = below(3) * 8000; }
            if (inputs.n_audio > 4) inputs.n_audio = 4;
            qhx_gen_cfg cfg = config(below(6) - 1);
            cfg.temperature = static_cast<float>(below(3));
            cfg.seed = static_cast<uint64_t>(below(3));
            qhx_generate_options options = whole_options();
            Asked asked{1 + below(12)};
            if (!below(3)) { options.should_cancel = should_cancel; options.should_cancel_user = &asked; }
            if (!below(3)) options.cache_salt = texts[below(6)];
            options.word_times = !below(8);
            options.struct_size = static_cast<size_t>(below(static_cast<unsigned>(sizeof options + 1)));
            Seen seen;
            const int act = below(4);
            seen.on_text = [&](int) {
                switch (act) {
                case 0: qhx_session_cancel(session); return 1;
                case 1: qhx_session_free(session); return 1;
                case 2: return 0;
                default: return 1;
                }
            };
            qhx_output out{};
            const qhx_status status = qhx_generate_ex(session, &inputs, below(5) ? &cfg : nullptr,
                                                      below(3) ? &options : nullptr, on_token, &seen, &out);
            CHECK(status == out.status);
            const bool answered = status == QHX_OK || status == QHX_ERROR_CANCELLED;
            CHECK(answered == (out.text != nullptr) && seen.finals <= 1 && seen.whole && seen.ordered);
            CHECK(!answered || std::strlen(out.text) == out.n_text);
            // Those of a model without text have no more than that to say.
            CHECK(status != QHX_ERROR_INTERNAL && status != QHX_ERROR_PANICKED);
        }
        }
    }
    for (auto *session : sessions) qhx_session_free(session);
    for (auto *model : models) qhx_model_free(model);
    for (auto *runtime : runtimes) qhx_runtime_free(runtime);
}

// What a device can do in few steps: two sessions on two threads, one of which is cancelled.
static void briefly(const char *bundle, const char *prompt, const std::string &expected) {
    for (int round = 0; round < 2; ++round) {
        qhx_runtime *runtime = qhx_runtime_create(nullptr, nullptr);
        CHECK(runtime);
        devices(runtime);
        qhx_model *model = qhx_model_load(runtime, bundle, nullptr);
        CHECK(model);
        const qhx_gen_cfg cfg = config(4);
        const qhx_inputs inputs = completion(prompt);
        auto work = [&](bool cancelled) {
            qhx_session *session = qhx_session_create(model);
            CHECK(session);
            Seen seen;
            seen.on_text = [&](int) {
                if (cancelled) qhx_session_cancel(session);
                return 1;
            };
            qhx_output out{};
            const qhx_status status = qhx_generate(session, &inputs, &cfg, on_token, &seen, &out);
            CHECK(status == (cancelled ? QHX_ERROR_CANCELLED : QHX_OK) && seen.text == out.text);
            CHECK(cancelled ? expected.rfind(seen.text, 0) == 0 : seen.text == expected);
            qhx_session_free(session);
        };
        std::thread other(work, true);
        work(false);
        other.join();
        qhx_model_free(model);
        qhx_runtime_free(runtime);
    }
}

int main(int argc, char **argv) {
    const std::string what = argc > 1 ? argv[1] : "";
    if (what == "all" && argc > 13) {
        all(argv + 2, (argc - 13) / 3);
    } else if (what == "brief" && argc == 5) {
        briefly(argv[2], argv[3], argv[4]);
    } else if ((what == "save" || what == "restore") && argc == 4) {
        qhx_runtime *runtime = qhx_runtime_create(nullptr, nullptr);
        qhx_model *model = qhx_model_load(runtime, argv[2], nullptr);
        CHECK(model);
        (what == "save" ? saves : restores)(model, argv[3]);
        qhx_model_free(model);
        qhx_runtime_free(runtime);
    } else if (what == "throw" && argc == 4) {
        qhx_runtime *runtime = qhx_runtime_create(nullptr, nullptr);
        qhx_session *session = qhx_session_create(qhx_model_load(runtime, argv[2], nullptr));
        Seen seen;
        seen.on_text = [](int) -> int { throw 1; };
        const qhx_inputs inputs = completion(argv[3]);
        std::fprintf(stderr, "begun\n");
        qhx_generate(session, &inputs, nullptr, on_token, &seen, nullptr);
    } else if (what == "loading" && argc == 3) {
        loading(argv[2]);
    } else if (what == "resetting" && argc == 4) {
        resetting(argv[2], argv[3]);
    } else if (what == "random" && argc == 6) {
        for (int seed = 0; seed < std::atoi(argv[2]); ++seed)
            random_sequence(static_cast<unsigned>(seed), argv[3], argv[4], argv[5]);
    } else {
        return 2;
    }
    std::fprintf(stderr, "%d checks passed, %d failed\n", passed.load(), failed.load());
    return failed != 0;
}
