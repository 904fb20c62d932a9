//! The variables of the hub's own tools. Libraries do not read them unasked.

use std::env;
use std::path::PathBuf;

use qhx_base::{ErrorKind, Result, error, files};

use crate::options::{ENDPOINT, HubOptions};

/// The variables that [`HubOptions::from_environment`] reads.
pub const VARIABLES: [&str; 12] = [
    "HF_ENDPOINT",
    "HF_TOKEN",
    "HF_TOKEN_PATH",
    "HF_HOME",
    "HF_HUB_CACHE",
    "HF_HUB_OFFLINE",
    "XDG_CACHE_HOME",
    "HTTPS_PROXY",
    "ALL_PROXY",
    "NO_PROXY",
    "SSL_CERT_FILE",
    "REQUESTS_CA_BUNDLE",
];

/// Longest file of a token.
const MAX_TOKEN: u64 = 4096;

impl HubOptions {
    /// Options as the hub's own tools take them from the environment: see [`VARIABLES`].
    ///
    /// # Errors
    /// When the user has no folder for a cache, or a variable is no text.
    pub fn from_environment() -> Result<Self> {
        let home = home()?;
        let cache = path("HF_HUB_CACHE").unwrap_or_else(|| home.join("hub"));
        let mut options = Self::new(cache)
            .endpoint(text("HF_ENDPOINT")?.unwrap_or_else(|| ENDPOINT.to_owned()))
            .offline(text("HF_HUB_OFFLINE")?.is_some_and(|value| is_true(&value)));
        let file = path("HF_TOKEN_PATH").unwrap_or_else(|| home.join("token"));
        options.token = match text("HF_TOKEN")? {
            Some(token) => Some(token),
            // Absent as a rule.
            None => files::read_text(ErrorKind::Io, &file, MAX_TOKEN).ok(),
        };
        options.token = options.token.map(|t| t.trim().to_owned()).filter(|t| !t.is_empty());
        options.proxy = first_text(&["HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"])?;
        options.authorities = path("SSL_CERT_FILE").or_else(|| path("REQUESTS_CA_BUNDLE"));
        options.no_proxy = first_text(&["NO_PROXY", "no_proxy"])?;
        Ok(options)
    }
}

/// `$HF_HOME`, or `huggingface` in the user's cache folder.
fn home() -> Result<PathBuf> {
    if let Some(home) = path("HF_HOME") {
        return Ok(home);
    }
    let user = env::home_dir().filter(|home| home.is_absolute()).map(|home| home.join(".cache"));
    let cache = path("XDG_CACHE_HOME").filter(|cache| cache.is_absolute()).or(user);
    cache.map(|cache| cache.join("huggingface")).ok_or_else(|| {
        error!(Io, "there is no cache folder: HOME is not set to an absolute path")
            .hint("set HF_HOME to a folder for what is fetched")
    })
}

fn path(name: &str) -> Option<PathBuf> {
    let value = env::var_os(name).filter(|value| !value.is_empty())?;
    let path = PathBuf::from(value);
    match (path.strip_prefix("~"), env::home_dir()) {
        (Ok(rest), Some(home)) => Some(home.join(rest)),
        _ => std::path::absolute(&path).ok(),
    }
}

fn text(name: &str) -> Result<Option<String>> {
    let Some(value) = env::var_os(name).filter(|value| !value.is_empty()) else { return Ok(None) };
    let not_utf8 = |_| error!(Usage, "{name} is not UTF-8");
    value.into_string().map(Some).map_err(not_utf8)
}

fn first_text(names: &[&str]) -> Result<Option<String>> {
    for name in names {
        if let Some(value) = text(name)? {
            return Ok(Some(value));
        }
    }
    Ok(None)
}

fn is_true(value: &str) -> bool {
    ["1", "ON", "YES", "TRUE"].iter().any(|word| value.eq_ignore_ascii_case(word))
}
