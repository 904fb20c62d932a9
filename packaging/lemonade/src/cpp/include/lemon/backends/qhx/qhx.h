#pragma once

#include "lemon/backends/backend_descriptor.h"

namespace lemon {
namespace backends {
namespace qhx {

// What the backend is. Lemonade finds the program `qhx` on the search path (variant "system").
inline const BackendDescriptor descriptor = {
    /*recipe*/          "qhx",
    /*display_name*/    "qhx (Hexagon NPU)",
    /*binary*/          "qhx",
    /*config_section*/  "",  // defaults to recipe
    /*default_device*/  DEVICE_NPU,
    /*slot_policy*/     SlotPolicy::Standard,  // models share the NPU
    /*selectable_backend*/ false,
    /*uses_ctx_size*/   false,  // a bundle has its own
    /*dynamic_models*/  false,
    /*options*/ {
        {"qhx_args", "--qhx-args", "", "ARGS", "Custom arguments to pass to qhx serve", "qhx Options"},
    },
    /*support*/ {
        {"system", {"linux", "windows"}, {{"cpu", {"x86_64", "arm64"}}}, "Hexagon NPU, or any x86_64/arm64 CPU"},
    },
    /*supported_modes*/ {"chat", "embeddings", "reranking", "transcription"},
    /*required_checkpoints*/ {"main"},
    /*default_capabilities*/ {},
    /*experimental*/    true,
    /*web_display_name*/ "",
    /*rocm_channels*/   {},
    /*exposes_prometheus_metrics*/ true,
    /*rocm_requires_cwsr_fix*/ false,
    /*version_policy*/  VersionPolicy::AtLeast,
    /*self_manages_downloads*/ false,
    /*takes_args*/      true,
    /*arg_variants*/    {},
    /*bin_variants*/    {},
    /*config_extra*/    nlohmann::json::object(),
};

}  // namespace qhx
}  // namespace backends
}  // namespace lemon
