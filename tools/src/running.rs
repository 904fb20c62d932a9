//! The models that a server has in memory, by Ollama's interface.

use std::time::Duration;

use qhx_base::{CancelToken, Error, ErrorKind, Result, error};
use serde::{Deserialize, Serialize};

/// Longest reply that is read.
const MAX_REPLY: u64 = 4 << 20;
/// Longest time for the whole reply: a server under load answers late.
const TIMEOUT: Duration = Duration::from_secs(10);

/// A model that a server has in memory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Running {
    /// Its name there.
    pub name: String,
    /// Bytes that it takes.
    #[serde(default, alias = "size")]
    pub bytes: u64,
    /// Time at which it is unloaded, if nobody uses it.
    #[serde(default, alias = "expires_at")]
    pub until: Option<String>,
}

/// Asks the server at `address`, such as `http://127.0.0.1:8080`, which models it has in memory.
///
/// # Errors
/// When nobody answers there, or what answers does not have Ollama's interface.
pub fn running(address: &str, cancel: &CancelToken) -> Result<Vec<Running>> {
    #[derive(Deserialize)]
    struct Reply {
        models: Vec<Running>,
    }
    cancel.check()?;
    let address = address.trim_end_matches('/');
    if !address.starts_with("http://") {
        return Err(error!(Usage, "{address}: expected http:// and a host with its port"));
    }
    let agent = ureq::Agent::config_builder()
        .timeout_global(Some(TIMEOUT))
        .http_status_as_error(false)
        .max_redirects(0)
        .max_redirects_will_error(false)
        .build()
        .new_agent();
    let reply = agent.get(format!("{address}/api/ps")).call().map_err(|e| {
        Error::caused(ErrorKind::Io, address, e).hint(
            "is a server running there? qhx serve BUNDLE starts one; --server URL names another",
        )
    })?;
    let status = reply.status();
    let body = reply.into_body().into_with_config().limit(MAX_REPLY).read_to_vec();
    let body = body.map_err(|e| Error::caused(ErrorKind::Io, address, e))?;
    if status.as_u16() == 401 {
        return Err(error!(Io, "{address}: it asks for an API key (HTTP 401)"));
    }
    let no_list = || error!(Io, "{address}: it has no list of models in memory (HTTP {status})");
    let reply: Reply = serde_json::from_slice(&body).map_err(|e| {
        no_list().with_source(e).hint("expected qhx serve, or another server with Ollama's /api/ps")
    })?;
    Ok(reply.models)
}
