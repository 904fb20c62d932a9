//! The models: known by their names, loaded when they are asked for, within a memory budget.

use std::cmp::Reverse;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock};
use std::time::{Duration, Instant};

use axum::http::StatusCode;
use qhx::{
    Bundle, CancelToken, Engine, ErrorKind, MediaRules, Message, Modality, Model, Result, Runtime,
    SamplingParams, Script, Sessions, Task, TextPipeline,
};
use serde_json::{Map, Value, json};
use sha2::{Digest as _, Sha256};

use crate::error::{ApiError, NoRoom};
use crate::ids;
use crate::metrics::{Gauges, Metrics};
use crate::options::ServerOptions;

/// A list of models at one time.
pub(crate) type Models = Arc<[Arc<Served>]>;

/// All that is served.
#[derive(Debug)]
pub(crate) struct Registry {
    /// Replaced as a whole when a model is added or removed: a request takes the list as it is.
    models: RwLock<Models>,
    runtime: Runtime,
    /// Time after which a model is unloaded where no request sets another.
    keep_alive: Option<Duration>,
    /// Bytes that loaded models may take.
    memory: Option<u64>,
    /// Names that are not known stand for the first model that can answer.
    any_model: bool,
    /// One model is loaded at a time.
    loading: Mutex<()>,
}

/// A model that is served.
#[derive(Debug)]
pub(crate) struct Served {
    pub name: String,
    /// Further names.
    aliases: Vec<String>,
    bundle: Bundle,
    tasks: Vec<Task>,
    modalities: Vec<Modality>,
    created: u64,
    /// SHA-256 of its manifest.
    digest: String,
    /// Bytes of the files that it opens; until it was loaded once, of those that its manifest names.
    bytes: AtomicU64,
    /// None until it is loaded.
    state: Mutex<Option<Box<Loaded>>>,
    /// Time after which it is unloaded unless somebody uses it; `None` keeps it.
    keep: Mutex<Option<Duration>>,
    /// The same where no request sets another.
    keep_alive: Option<Duration>,
    /// True if clients added it, and may remove it.
    pub added: bool,
    /// Set once it is not served any more: nothing loads it then.
    removed: AtomicBool,
    info: OnceLock<Arc<Info>>,
}

#[derive(Debug)]
struct Loaded {
    sessions: Sessions,
    /// The one that was used the longest time ago is the first.
    idle: Vec<Seat>,
    /// Sessions that somebody works with.
    busy: usize,
    /// Bytes of the states of earlier conversations.
    states: u64,
    /// Bytes that each session allocates.
    session: u64,
    used: Instant,
}

impl Loaded {
    fn sessions(&self) -> usize {
        self.idle.len() + self.busy
    }
}

/// A session of a model.
#[derive(Debug)]
pub(crate) struct Seat {
    pub engine: Engine,
    /// Conversation in its state: see [`common`].
    pub history: Vec<u64>,
    /// Time of its last use.
    since: Instant,
}

impl Seat {
    fn new(engine: Engine) -> Self {
        Self { engine, history: Vec::new(), since: Instant::now() }
    }
}

/// A session that is being opened. Unless it was, its place is given back, also by a panic.
struct Opening<'a>(Option<&'a Served>);

impl Drop for Opening<'_> {
    fn drop(&mut self) {
        if let Some(model) = self.0 {
            model.put(None);
        }
    }
}

/// Properties of a model that was loaded once.
#[derive(Debug)]
pub(crate) struct Info {
    pub texts: Arc<TextPipeline>,
    pub rules: MediaRules,
    pub modalities: Vec<Modality>,
    pub can_call: bool,
    pub dimensions: usize,
    /// Sampling where a request leaves it out. As the interfaces have it, the temperature is 1 unless the
    /// bundle has its own.
    pub sampling: SamplingParams,
    backend: String,
    activations: Option<String>,
    caches: Option<String>,
    op: String,
    /// True if the template takes a message of the system at the beginning, once that was tried.
    takes_system: OnceLock<bool>,
}

/// Facts about a model that need not be loaded.
#[derive(Debug)]
pub(crate) struct Facts<'a> {
    pub bytes: u64,
    pub digest: &'a str,
    /// Seconds since 1970.
    pub created: u64,
    pub family: &'a str,
    pub precision: &'a str,
    pub hidden: Option<usize>,
    pub layers: Option<usize>,
}

/// Ability of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ability {
    Generate,
    Embed,
    Transcribe,
    Speak,
    Rerank,
}

impl Ability {
    /// Verb of the ability, and a hint that names a bundle with it.
    fn words(self) -> (&'static str, &'static str) {
        match self {
            Self::Generate => ("generate text", "serve a bundle of a language model"),
            Self::Embed => (
                "embed texts",
                "serve a bundle of an encoder, which `qhx forge --task embed` makes, such as of llama_embed_sharded",
            ),
            Self::Transcribe => (
                "transcribe audio",
                "serve a bundle that hears, such as of gemma4_split_generate, whose manifest has params.transcription",
            ),
            Self::Speak => (
                "speak",
                "serve a bundle with voices, such as of kokoro_speak, which `qhx forge` makes of Kokoro",
            ),
            Self::Rerank => (
                "rank documents",
                "serve a bundle of a reranker, which `qhx forge --rerank` makes, such as of Qwen3-Reranker, or \
                 `--task score` of a cross-encoder",
            ),
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Registry {
    /// Looks at what the bundles declare; none is loaded.
    pub(crate) fn new(options: &ServerOptions) -> Result<Self> {
        use qhx::{Error, ErrorKind::Usage};
        let ServerOptions { bundles, runtime, memory, any_model, keep_alive, .. } = options;
        let mut models: Vec<Arc<Served>> = Vec::with_capacity(bundles.len());
        for (names, bundle) in bundles {
            let taken = |name: &&String| models.iter().any(|model| model.is_named(name));
            if let Some(name) = names.iter().find(taken) {
                return Err(Error::new(Usage, format!("two bundles have the name {name:?}"))
                    .hint("give one of them another name: NAME=BUNDLE"));
            }
            let Some((name, aliases)) = names.split_first() else { continue };
            let served = Served::new(name, bundle, runtime, *keep_alive)?;
            models.push(Arc::new(Served { aliases: aliases.to_vec(), ..served }));
        }
        if models.is_empty() && options.catalog.is_none() {
            return Err(Error::new(Usage, "there is no bundle to serve"));
        }
        Ok(Self {
            models: RwLock::new(models.into()),
            runtime: runtime.clone().batching(options.batching),
            keep_alive: *keep_alive,
            memory: *memory,
            any_model: *any_model,
            loading: Mutex::default(),
        })
    }

    /// The models that are served now.
    pub(crate) fn models(&self) -> Models {
        Arc::clone(&self.models.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Serves the bundle at a path too, under this name. One that is served under it stays as it is.
    pub(crate) fn add(&self, name: &str, path: &Path) -> Result<()> {
        let bundle = self.runtime.bundle(path, None)?;
        let served = Served::new(name, &bundle, &self.runtime, self.keep_alive)?;
        let served = Arc::new(Served { added: true, ..served });
        let mut models = self.models.write().unwrap_or_else(PoisonError::into_inner);
        if !models.iter().any(|model| model.is_named(name)) {
            *models = models.iter().cloned().chain([served]).collect();
        }
        Ok(())
    }

    /// Unloads a model and serves it no more. False, and no change, where somebody works with it.
    pub(crate) fn withdraw(&self, model: &Served) -> bool {
        let _one = lock(&self.loading);
        if model.is_loaded() && !model.unload() {
            return false;
        }
        model.removed.store(true, Ordering::Release);
        let mut models = self.models.write().unwrap_or_else(PoisonError::into_inner);
        *models = models.iter().filter(|other| other.name != model.name).cloned().collect();
        true
    }

    /// The model with a name.
    pub(crate) fn named(&self, name: &str) -> Option<Arc<Served>> {
        named(&self.models(), name).cloned()
    }

    /// The model that a request names. Where there is one only, it may leave the name out.
    pub(crate) fn find(&self, name: Option<&str>) -> Result<Arc<Served>, ApiError> {
        self.find_among(&self.models(), name).cloned()
    }

    fn find_among<'a>(
        &self,
        models: &'a [Arc<Served>],
        name: Option<&str>,
    ) -> Result<&'a Arc<Served>, ApiError> {
        match (name, models) {
            (None, []) => Err(ApiError::new(StatusCode::NOT_FOUND, "no model is served yet")
                .param("model")
                .code("model_not_found")),
            (None, _) => only(&models.iter().collect::<Vec<_>>()).ok_or_else(|| {
                ApiError::bad("model", "it is missing, and several are served")
                    .code("missing_required_parameter")
            }),
            (Some(name), models) => {
                let any = models.first().filter(|_| self.any_model);
                named(models, name).or(any).ok_or_else(|| {
                    let name: String = name.chars().take(100).collect();
                    let message = format!("the model {name:?} is not served here");
                    ApiError::new(StatusCode::NOT_FOUND, message)
                        .param("model")
                        .code("model_not_found")
                })
            }
        }
    }

    /// Same as [`Registry::find`], for a model with an ability.
    pub(crate) fn able(
        &self,
        name: Option<&str>,
        ability: Ability,
    ) -> Result<Arc<Served>, ApiError> {
        let models = self.models();
        let others: Vec<_> = models.iter().filter(|model| model.can(ability)).collect();
        let (verb, remedy) = ability.words();
        if others.is_empty() {
            let message = format!("no model here can {verb}: {remedy}");
            return Err(ApiError::new(StatusCode::NOT_IMPLEMENTED, message).code("not_served"));
        }
        // Where one only can do it, there is nothing to choose.
        let model = match (name, others.as_slice()) {
            (None, others) => only(others).map_or_else(|| self.find_among(&models, None), Ok)?,
            (Some(name), [first, ..]) if self.any_model => named(&models, name).unwrap_or(first),
            _ => self.find_among(&models, name)?,
        };
        if model.can(ability) {
            return Ok(Arc::clone(model));
        }
        let others: Vec<_> = others.iter().map(|model| model.name.as_str()).collect();
        let message = format!("{} does not {verb}; here does: {}", model.name, others.join(", "));
        Err(ApiError::bad("model", message).code("model_not_supported"))
    }

    /// A session of a model, which nobody else works with. The model is loaded where it is not.
    pub(crate) fn take(
        &self,
        model: &Served,
        history: &[u64],
        max: usize,
        metrics: &Metrics,
    ) -> Result<Seat> {
        loop {
            if let Some(seat) = model.seat(history, max) {
                return seat;
            }
            self.load(model, metrics)?;
        }
    }

    /// Loads a model, unless it is. Others go where the memory does not hold all.
    pub(crate) fn load(&self, model: &Served, metrics: &Metrics) -> Result<()> {
        let _one = lock(&self.loading);
        if model.is_loaded() {
            return Ok(());
        }
        if model.removed.load(Ordering::Acquire) {
            return Err(qhx::Error::new(ErrorKind::Usage, "the model was removed"));
        }
        self.make_room(model)?;
        let loaded = self.runtime.load(&model.bundle)?;
        metrics.loads.fetch_add(1, Ordering::Relaxed);
        let sessions = loaded.sessions();
        let engine = Engine::new(loaded)?;
        model.info.get_or_init(|| Arc::new(Info::new(engine.model())));
        tracing::info!("model {} is loaded", model.name);
        model.bytes.store(engine.model().file_bytes(), Ordering::Relaxed);
        *lock(&model.state) = Some(Box::new(Loaded {
            sessions,
            session: engine.model().session_bytes(),
            idle: vec![Seat::new(engine)],
            busy: 0,
            states: 0,
            used: Instant::now(),
        }));
        Ok(())
    }

    /// Unloads others until the model fits the budget. Where it alone is larger, all others go.
    fn make_room(&self, model: &Served) -> Result<()> {
        let Some(budget) = self.memory else { return Ok(()) };
        let bytes = model.bytes.load(Ordering::Relaxed);
        if self.shrink(budget.saturating_sub(bytes), model) {
            return Ok(());
        }
        let message = format!(
            "model {}: {bytes} bytes do not fit the memory budget of {budget} beside models in use",
            model.name
        );
        Err(qhx::Error::new(ErrorKind::Runtime, message)
            .with_source(NoRoom)
            .hint("raise --model-memory, or send fewer requests to different models at once"))
    }

    /// Gives a session of a model back. Sessions that nobody uses go where the budget is exceeded, then other models.
    pub(crate) fn put(&self, model: &Served, seat: Option<Seat>) {
        model.put(seat);
        if let Some(budget) = self.memory {
            self.shrink(budget, model);
        }
    }

    /// Closes sessions that nobody uses, then unloads the models that were used the longest time ago, all but one,
    /// until what is loaded has no more than `bytes`. Returns whether it has.
    fn shrink(&self, bytes: u64, but: &Served) -> bool {
        while self.loaded_bytes() > bytes {
            if self.release(Duration::ZERO) > 0 {
                continue;
            }
            let Some(oldest) = self.oldest_unused(but) else { return false };
            oldest.unload();
        }
        true
    }

    /// Closes sessions that nobody has used for `idle`, all but one of each model. Returns their number.
    pub(crate) fn release(&self, idle: Duration) -> usize {
        self.models().iter().map(|model| model.release(idle)).sum()
    }

    /// Unloads models that nobody has used for as long as they are kept. Returns their number.
    pub(crate) fn expire(&self) -> usize {
        let expired = |model: &Arc<Served>| model.expires().is_some_and(|at| at <= Instant::now());
        self.models().iter().filter(|model| expired(model) && model.unload()).count()
    }

    /// Time at which [`Registry::release`] has a session to close or [`Registry::expire`] a model to unload, as far as
    /// is known now.
    pub(crate) fn next_release(&self, idle: Duration) -> Option<Instant> {
        let models = self.models();
        let closed = models.iter().filter_map(|model| model.surplus_since());
        let closed = closed.filter_map(|since| since.checked_add(idle));
        closed.chain(models.iter().filter_map(|model| model.expires())).min()
    }

    /// The least recently used of the other models that nobody works with.
    fn oldest_unused(&self, but: &Served) -> Option<Arc<Served>> {
        let models = self.models();
        let others = models.iter().filter(|other| other.name != but.name);
        let unused = others.filter_map(|other| Some((other.unused()?, other)));
        unused.min_by_key(|(used, _)| *used).map(|(_, oldest)| Arc::clone(oldest))
    }

    fn loaded_bytes(&self) -> u64 {
        self.models().iter().map(|model| model.loaded_bytes()).sum()
    }

    /// Properties of a model. It is loaded if it never was.
    pub(crate) fn info(&self, model: &Served, metrics: &Metrics) -> Result<Arc<Info>> {
        loop {
            if let Some(info) = model.info.get() {
                return Ok(Arc::clone(info));
            }
            self.load(model, metrics)?;
        }
    }

    pub(crate) fn gauges(&self, gauges: Gauges) -> Gauges {
        let loaded = self.models().iter().filter(|model| model.is_loaded()).count();
        Gauges { loaded, loaded_bytes: self.loaded_bytes(), ..gauges }
    }
}

impl Served {
    /// A model as its bundle declares it; nothing is loaded.
    fn new(
        name: &str,
        bundle: &Bundle,
        runtime: &Runtime,
        keep_alive: Option<Duration>,
    ) -> Result<Self> {
        let description = runtime.host_op(bundle)?;
        Ok(Self {
            name: name.to_owned(),
            aliases: Vec::new(),
            tasks: description.tasks,
            modalities: description.modalities,
            created: ids::now(),
            digest: digest(bundle),
            bytes: AtomicU64::new(expected(bundle)),
            bundle: bundle.clone(),
            state: Mutex::default(),
            keep: Mutex::new(keep_alive),
            keep_alive,
            added: false,
            removed: AtomicBool::new(false),
            info: OnceLock::new(),
        })
    }

    /// True for one of its names.
    pub(crate) fn is_named(&self, name: &str) -> bool {
        self.name == name || self.aliases.iter().any(|alias| alias == name)
    }

    /// True if it has the ability, as far as its manifest and its host-op declare.
    pub(crate) fn can(&self, ability: Ability) -> bool {
        match ability {
            Ability::Generate => self.tasks.contains(&Task::Generate),
            Ability::Embed => {
                let rerank = self.bundle.manifest().params.rerank.is_some();
                self.tasks.contains(&Task::Embed) && !self.can(Ability::Generate) && !rerank
            }
            Ability::Transcribe => self.bundle.manifest().params.transcription.is_some(),
            Ability::Speak => self.bundle.manifest().params.speech.is_some(),
            Ability::Rerank => self.bundle.manifest().params.rerank.is_some(),
        }
    }

    /// True for a reranker whose prompt has an instruction.
    pub(crate) fn takes_instruction(&self) -> bool {
        let rerank = self.bundle.manifest().params.rerank.as_ref();
        rerank.is_some_and(|rerank| rerank.prompt.contains("{instruction}"))
    }

    /// Codes of the languages that it transcribes, where it declares them.
    pub(crate) fn languages(&self) -> Vec<String> {
        let transcription = self.bundle.manifest().params.transcription.as_ref();
        transcription.map_or_else(Vec::new, |declared| declared.languages.keys().cloned().collect())
    }

    /// The names of its voices.
    pub(crate) fn voices(&self) -> &[String] {
        let speech = self.bundle.manifest().params.speech.as_ref();
        speech.map_or(&[], |speech| &speech.voices)
    }

    /// Language of a voice, where its manifest says one.
    pub(crate) fn language_of(&self, voice: &str) -> Option<String> {
        let speech = self.bundle.manifest().params.speech.as_ref()?;
        let at = speech.voices.iter().position(|known| known == voice)?;
        match speech.scripts.get(at)? {
            Script::Espeak { voice, .. } => voice.split(['-', '_']).next().map(str::to_owned),
            _ => None,
        }
    }

    /// Sets the time after which it is unloaded unless somebody uses it; `None` keeps it.
    pub(crate) fn keep(&self, time: Option<Duration>) {
        *lock(&self.keep) = time;
    }

    /// When it is unloaded, where it is loaded and nobody works with it.
    pub(crate) fn expires(&self) -> Option<Instant> {
        let keep = (*lock(&self.keep))?;
        self.unused()?.checked_add(keep)
    }

    pub(crate) fn is_loaded(&self) -> bool {
        lock(&self.state).is_some()
    }

    /// Bytes of its files, its states and its sessions, where it is loaded.
    pub(crate) fn loaded_bytes(&self) -> u64 {
        lock(&self.state).as_ref().map_or(0, |loaded| {
            let sessions = loaded.session.saturating_mul(loaded.sessions() as u64);
            self.bytes.load(Ordering::Relaxed) + loaded.states + sessions
        })
    }

    /// When it was used last, where it is loaded and nobody works with it.
    fn unused(&self) -> Option<Instant> {
        lock(&self.state).as_ref().filter(|loaded| loaded.busy == 0).map(|loaded| loaded.used)
    }

    /// Last use of the oldest idle session, where the model has another one.
    fn surplus_since(&self) -> Option<Instant> {
        let state = lock(&self.state);
        let loaded = state.as_ref().filter(|loaded| loaded.sessions() > 1)?;
        loaded.idle.first().map(|seat| seat.since)
    }

    fn release(&self, idle: Duration) -> usize {
        let mut closed = Vec::new();
        if let Some(loaded) = &mut *lock(&self.state) {
            let old = |seat: &Seat| seat.since.elapsed() >= idle;
            while loaded.sessions() > 1 && loaded.idle.first().is_some_and(old) {
                closed.push(loaded.idle.remove(0));
            }
        }
        closed.len()
    }

    /// Unloads it once nobody works with it, which may be now.
    pub(crate) fn unload_soon(&self) {
        if !self.unload() {
            self.keep(if self.is_loaded() { Some(Duration::ZERO) } else { self.keep_alive });
        }
    }

    /// True if it was loaded and nobody worked with it. How long it is kept is then as it was at first.
    fn unload(&self) -> bool {
        let unloaded = lock(&self.state).take_if(|loaded| loaded.busy == 0);
        if unloaded.is_some() {
            // It ends without the lock.
            drop(unloaded);
            self.keep(self.keep_alive);
            tracing::info!("model {} is unloaded", self.name);
            return true;
        }
        false
    }

    /// A session: of the idle ones that which has most of the conversation; where none has any of it, a new one if
    /// there are fewer than `max`, or else the one that was used the longest time ago. `None` where the model is not
    /// loaded.
    fn seat(&self, history: &[u64], max: usize) -> Option<Result<Seat>> {
        let mut state = lock(&self.state);
        let loaded = state.as_mut()?;
        loaded.used = Instant::now();
        let idle = loaded.idle.iter().enumerate();
        let counts = idle.map(|(at, seat)| (common(&seat.history, history), at));
        let best = counts.max_by_key(|&(common, at)| (common, Reverse(at)));
        let fits = |(common, at): (usize, usize)| {
            let unused = loaded.idle.get(at).is_some_and(|seat| seat.history.is_empty());
            common > 0 || unused || loaded.sessions() >= max
        };
        let best = best.filter(|best| fits(*best)).map(|(_, at)| loaded.idle.remove(at));
        loaded.busy += 1;
        let sessions = loaded.sessions.clone();
        drop(state);
        if best.is_some() {
            return best.map(Ok);
        }
        let mut opening = Opening(Some(self));
        let opened = sessions.open().and_then(Engine::new).map(Seat::new);
        if opened.is_ok() {
            opening.0 = None;
        }
        Some(opened)
    }

    /// Gives a session back; none where it is of no more use.
    fn put(&self, seat: Option<Seat>) {
        if let Some(loaded) = &mut *lock(&self.state) {
            // All sessions share them.
            let states = seat.as_ref().map(|seat| seat.engine.model().kept_states().bytes as u64);
            loaded.states = states.unwrap_or(loaded.states);
            loaded.busy = loaded.busy.saturating_sub(1);
            loaded.used = Instant::now();
            loaded.idle.extend(seat.map(|seat| Seat { since: loaded.used, ..seat }));
        }
    }

    /// Positions of its context, as its manifest has them until it was loaded.
    pub(crate) fn positions(&self) -> Option<usize> {
        let loaded = self.info.get().map(|info| info.texts.max_ctx());
        loaded.or(self.bundle.manifest().params.max_ctx)
    }

    /// Bytes of its files.
    pub(crate) fn file_bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Facts as Ollama's interface has them.
    pub(crate) fn facts(&self) -> Facts<'_> {
        let manifest = self.bundle.manifest();
        Facts {
            bytes: self.file_bytes(),
            digest: &self.digest,
            created: self.created,
            family: manifest.model.family.as_deref().unwrap_or("unknown"),
            precision: manifest.model.rest.get("precision").and_then(Value::as_str).unwrap_or(""),
            hidden: manifest.params.hidden,
            layers: manifest.params.n_layers,
        }
    }

    /// Abilities in the words of a [`Catalog`](crate::Catalog).
    pub(crate) fn does(&self) -> Vec<&'static str> {
        let text = self.can(Ability::Generate).then_some("text");
        let takes = self.modalities.iter().filter(|_| text.is_some());
        let takes = takes.map(|modality| modality.name()).filter(|name| *name != "text");
        let abilities = [
            (Ability::Transcribe, "transcribe"),
            (Ability::Speak, "speak"),
            (Ability::Embed, "embed"),
            (Ability::Rerank, "rerank"),
        ];
        let other = abilities.into_iter().filter(|(ability, _)| self.can(*ability));
        text.into_iter().chain(takes).chain(other.map(|(_, name)| name)).collect()
    }

    pub(crate) fn sees(&self) -> bool {
        self.modalities.contains(&Modality::Image)
    }

    /// The entry of `/v1/models`.
    pub(crate) fn json(&self) -> Value {
        let mut json = json!({
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "qhx",
            "loaded": self.is_loaded(),
        });
        use Ability::{Embed, Generate, Rerank, Speak, Transcribe};
        let abilities = [Generate, Embed, Transcribe, Speak, Rerank].into_iter();
        let abilities = abilities.filter(|ability| self.can(*ability));
        json["abilities"] =
            abilities.map(|ability| format!("{ability:?}").to_lowercase()).collect();
        if !self.aliases.is_empty() {
            json["aliases"] = self.aliases.clone().into();
        }
        if let Some(positions) = self.positions() {
            json["max_model_len"] = positions.into();
        }
        if self.can(Speak) {
            json["voices"] = self.voices().into();
        }
        json["modalities"] = self.modalities.iter().map(|modality| modality.name()).collect();
        if let Some(info) = self.info.get() {
            json["backend"] = info.backend.as_str().into();
            for (name, value) in [("activations", &info.activations), ("caches", &info.caches)] {
                if let Some(value) = value {
                    json[name] = value.as_str().into();
                }
            }
            json["host_op"] = info.op.as_str().into();
        }
        json
    }
}

impl Info {
    fn new(model: &Model) -> Self {
        let description = &model.op().description;
        Self {
            texts: model.texts(),
            rules: model.media_rules(),
            modalities: description.modalities.clone(),
            can_call: model.texts().call_format().is_some(),
            dimensions: model.info().embedding_dim,
            sampling: model
                .sampling()
                .cloned()
                .unwrap_or_else(|| SamplingParams::default().temperature(1.0)),
            backend: model.backend().name.clone(),
            activations: model.backend().activations().map(str::to_owned),
            caches: model.backend().caches().map(str::to_owned),
            op: description.name.clone(),
            takes_system: OnceLock::new(),
        }
    }

    /// True if the template takes a message of the system at the beginning.
    pub(crate) fn takes_system(&self, cancel: &CancelToken) -> bool {
        *self.takes_system.get_or_init(|| {
            let messages = ["system", "user"].map(|role| Message::new(role, "a"));
            self.texts.render(&messages, None, &Map::new(), cancel).is_ok()
        })
    }
}

/// The model that a request means that names none: the only one, or the only one that the server was started with.
fn only<'a>(models: &[&'a Arc<Served>]) -> Option<&'a Arc<Served>> {
    let given: Vec<_> = models.iter().copied().filter(|model| !model.added).collect();
    match (models, given.as_slice()) {
        ([only], _) | (_, [only]) => Some(only),
        _ => None,
    }
}

/// The model with a name, among some.
fn named<'a>(models: &'a [Arc<Served>], name: &str) -> Option<&'a Arc<Served>> {
    models.iter().find(|model| model.is_named(name))
}

fn digest(bundle: &Bundle) -> String {
    let digest = Sha256::digest(bundle.manifest().raw.to_string());
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Number of messages at the beginning that two conversations have in common. Each message is a hash.
fn common(a: &[u64], b: &[u64]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

/// Bytes that a bundle is expected to open: its binaries and its table, or, where it has none, the files of its folder.
fn expected(bundle: &Bundle) -> u64 {
    let manifest = bundle.manifest();
    let artifacts = manifest.open_artifacts();
    let root = artifacts.root();
    let len = |file: &str| std::fs::metadata(root.join(file)).map_or(0, |file| file.len());
    let binaries = manifest.artifacts.contexts.iter().filter_map(|entry| entry.bin.as_deref());
    let binaries: u64 = binaries.map(len).sum();
    if binaries > 0 {
        return binaries + manifest.artifacts.embed.as_ref().map_or(0, |table| len(&table.path));
    }
    let Ok(entries) = std::fs::read_dir(root) else { return 0 };
    // Files may be links, as in the cache of a hub.
    let files = entries.filter_map(|entry| std::fs::metadata(entry.ok()?.path()).ok());
    files.filter(std::fs::Metadata::is_file).map(|file| file.len()).sum()
}
