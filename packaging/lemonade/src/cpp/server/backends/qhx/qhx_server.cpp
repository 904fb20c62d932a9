#include "lemon/backends/qhx/qhx_server.h"

#include <optional>
#include <set>
#include <stdexcept>
#include <vector>

#include "lemon/backends/qhx/qhx.h"
#include "lemon/model_manager.h"
#include <lemon/utils/aixlog.hpp>
#include "lemon/utils/custom_args.h"
#include "lemon/utils/http_client.h"
#include "lemon/utils/process_manager.h"

using namespace lemon::utils;

namespace lemon {
namespace backends {

QhxServer::QhxServer(const std::string& log_level, ModelManager* model_manager, BackendManager* backend_manager)
    : WrappedServer("qhx", log_level, model_manager, backend_manager) {}

QhxServer::~QhxServer() {
    unload();
}

void QhxServer::load(const std::string& model_name, const ModelInfo& model_info, const RecipeOptions& options,
                     bool do_not_upgrade) {
    (void)do_not_upgrade;
    const std::string bundle = model_info.resolved_path();
    if (bundle.empty()) {
        throw std::runtime_error("no bundle of " + model_info.checkpoint() + ": pull the model first");
    }
    const std::string program = BackendUtils::get_backend_binary_path(*qhx::spec(), "system");
    port_ = choose_port();
    // Requests name the model as Lemonade does.
    std::vector<std::string> args = {
        "serve", model_name + "=" + bundle, "--host", "127.0.0.1", "--port", std::to_string(port_)};
    const std::string more = options.get_option("qhx_args");
    if (!more.empty()) {
        const std::set<std::string> reserved = {"--host", "--port", "--api-key-file"};
        const std::string wrong = validate_custom_args(more, reserved);
        if (!wrong.empty()) {
            throw std::invalid_argument("custom arguments of qhx serve: " + wrong);
        }
        const std::vector<std::string> split = parse_custom_args(more);
        args.insert(args.end(), split.begin(), split.end());
    }
    const bool shown = log_level_ == "info" || is_debug();
    const ProcessHandle handle = ProcessManager::start_process(program, args, "", shown, true);
    set_process_handle(handle, program, args);
    LOG(INFO, "qhx") << "Serving " << bundle << " on port " << port_ << std::endl;
    if (!wait_for_ready("/health")) {
        unload();
        throw std::runtime_error("qhx serve does not answer: qhx doctor " + bundle + " says why");
    }
}

void QhxServer::unload() {
    stop_backend_watchdog();
    const ProcessHandle handle = consume_process_handle_for_cleanup();
    if (has_process_handle(handle)) {
        ProcessManager::stop_process(handle);
    }
}

json QhxServer::chat_completion(const json& request) {
    return forward_request("/v1/chat/completions", request);
}

json QhxServer::completion(const json& request) {
    return forward_request("/v1/completions", request);
}

json QhxServer::responses(const json& request) {
    return forward_request("/v1/responses", request);
}

json QhxServer::embeddings(const json& request) {
    return forward_request("/v1/embeddings", request);
}

json QhxServer::reranking(const json& request) {
    return forward_request("/v1/rerank", request);
}

// Lemonade hands the file on as `file_data`, with its name as `filename`.
json QhxServer::audio_transcriptions(const json& request) {
    std::vector<MultipartField> fields;
    MultipartField file;
    file.name = "file";
    file.data = request.value("file_data", "");
    file.filename = request.value("filename", "audio");
    file.content_type = "application/octet-stream";
    fields.push_back(file);
    for (const char* name : {"language", "prompt", "response_format", "temperature"}) {
        if (request.contains(name)) {
            MultipartField field;
            field.name = name;
            field.data = request[name].is_string() ? request[name].get<std::string>() : request[name].dump();
            fields.push_back(field);
        }
    }
    return forward_multipart_request("/v1/audio/transcriptions", fields);
}

namespace qhx {

std::unique_ptr<WrappedServer> create(const BackendContext& ctx) {
    return make_server<QhxServer>(ctx);
}

namespace {
class QhxOps : public BackendOps {
public:
    std::string validate_registration_checkpoint(const std::string& checkpoint) const override {
        const bool folder = checkpoint.find(':') != std::string::npos || checkpoint.rfind("/", 0) == 0;
        return folder ? "" : "a bundle is a folder of a repository: OWNER/NAME:FOLDER, such as OWNER/qwen35_HNPU:v81";
    }

    // A bundle is all files in the folder that the variant names.
    std::optional<std::vector<std::string>> select_checkpoint_files(
        const std::string& main_variant, const std::vector<std::string>& repo_files) const override {
        std::vector<std::string> files;
        for (const auto& file : repo_files) {
            if (file.rfind(main_variant + "/", 0) == 0) {
                files.push_back(file);
            }
        }
        if (files.empty()) {
            throw std::runtime_error("no bundle in the folder " + main_variant);
        }
        return files;
    }
};
}  // namespace

// Nothing is fetched: the package of qhx puts the program on the search path.
const BackendSpec* spec() {
    static const BackendSpec kSpec(descriptor.recipe, descriptor.binary);
    return &kSpec;
}
const BackendOps* ops() { return single_ops<QhxOps>(); }

}  // namespace qhx
}  // namespace backends
}  // namespace lemon
