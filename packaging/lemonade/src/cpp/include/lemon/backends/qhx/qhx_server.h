#pragma once

#include <memory>
#include <string>

#include "lemon/backends/backend_registry.h"
#include "lemon/backends/backend_utils.h"
#include "lemon/server_capabilities.h"
#include "lemon/wrapped_server.h"

namespace lemon {
namespace backends {

// A bundle that `qhx serve` answers for.
class QhxServer : public WrappedServer,
                  public IEmbeddingsServer,
                  public IRerankingServer,
                  public ITranscriptionServer {
public:
    QhxServer(const std::string& log_level, ModelManager* model_manager, BackendManager* backend_manager);
    ~QhxServer() override;

    void load(const std::string& model_name, const ModelInfo& model_info, const RecipeOptions& options,
              bool do_not_upgrade = false) override;
    void unload() override;

    json chat_completion(const json& request) override;
    json completion(const json& request) override;
    json responses(const json& request) override;
    json embeddings(const json& request) override;
    json reranking(const json& request) override;
    json audio_transcriptions(const json& request) override;
};

namespace qhx {
std::unique_ptr<WrappedServer> create(const BackendContext& ctx);
const BackendSpec* spec();
const BackendOps* ops();
constexpr uint32_t capabilities() { return capability_mask_of<QhxServer>(); }
}  // namespace qhx
}  // namespace backends
}  // namespace lemon
