//! The files that say how images, videos and audio become numbers.

use std::path::PathBuf;

use qhx_base::{Error, ErrorKind, Result};
use qhx_checkpoint::{Checkpoint, read_json};
use serde_json::Value;

/// File that `transformers` 5 saves, with an object for each part.
const WHOLE: &str = "processor_config.json";

/// A part of a checkpoint's processor: how images, videos or audio become numbers. Of a synthetic model it is empty.
#[derive(Debug, Clone)]
pub struct Processor {
    path: PathBuf,
    /// The object in the file; none where the file has it alone.
    part: Option<&'static str>,
    value: Value,
}

impl Processor {
    /// Images.
    ///
    /// # Errors
    /// When no file of the checkpoint says it, since defaults would be those of another one, or it is no JSON.
    pub fn image(checkpoint: &Checkpoint) -> Result<Self> {
        Self::read(checkpoint, &["image_processor"], &["preprocessor_config.json"])
    }

    /// Images, of a checkpoint whose own code has the values.
    pub fn of_code(checkpoint: &Checkpoint, value: Value) -> Self {
        Self { path: checkpoint.config_path().to_owned(), part: None, value }
    }

    /// Videos.
    ///
    /// # Errors
    /// Errors of [`Processor::image`].
    pub fn video(checkpoint: &Checkpoint) -> Result<Self> {
        let files = ["video_preprocessor_config.json", "preprocessor_config.json"];
        Self::read(checkpoint, &["video_processor"], &files)
    }

    /// Audio.
    ///
    /// # Errors
    /// Errors of [`Processor::image`].
    pub fn audio(checkpoint: &Checkpoint) -> Result<Self> {
        let parts = ["feature_extractor", "audio_processor"];
        Self::read(checkpoint, &parts, &["preprocessor_config.json"])
    }

    /// The first of `parts` in [`WHOLE`], or else the first of `files` that is there: the order of `transformers`.
    /// Errors when there is none of them, since defaults would be those of another checkpoint.
    fn read(checkpoint: &Checkpoint, parts: &[&'static str], files: &[&str]) -> Result<Self> {
        let dir = checkpoint.dir();
        if checkpoint.seed().is_some() {
            return Ok(Self { path: dir.to_owned(), part: None, value: Value::Null });
        }
        let path = dir.join(WHOLE);
        if path.is_file() {
            let mut whole = read_json(&path)?;
            let part = parts.iter().find(|part| whole.get(**part).is_some_and(Value::is_object));
            if let Some(part) = part {
                return Ok(Self { path, part: Some(part), value: whole[*part].take() });
            }
        }
        if let Some(path) = files.iter().map(|file| dir.join(file)).find(|path| path.is_file()) {
            return Ok(Self { value: read_json(&path)?, path, part: None });
        }
        let inside = parts.iter().find_map(|part| Some((part, checkpoint.processor().get(part)?)));
        if let Some((part, value)) = inside {
            let path = checkpoint.path().to_owned();
            return Ok(Self { path, part: Some(part), value: value.clone() });
        }
        let what = format!(
            "{}: neither {WHOLE} with {} nor {} is there",
            dir.display(),
            parts.join(" or "),
            files.join(" or ")
        );
        Err(Error::new(ErrorKind::Artifact, what)
            .hint("put the files of the model's processor beside its config.json: sizes and limits stand there"))
    }

    /// True of a synthetic model, beside whose configuration nothing is looked for.
    pub fn is_empty(&self) -> bool {
        self.value.is_null()
    }

    /// The value at a JSON pointer; none when it is absent or null.
    pub fn get(&self, pointer: &str) -> Option<&Value> {
        self.value.pointer(pointer).filter(|value| !value.is_null())
    }

    /// Three numbers, one a channel, such as `/image_mean`; none when they are absent.
    ///
    /// # Errors
    /// When there are other values.
    pub fn triple(&self, pointer: &str) -> Result<Option<[f64; 3]>> {
        let Some(value) = self.get(pointer) else { return Ok(None) };
        let numbers: Option<Vec<f64>> =
            value.as_array().and_then(|list| list.iter().map(Value::as_f64).collect());
        let numbers = numbers.and_then(|list| <[f64; 3]>::try_from(list).ok());
        numbers.map(Some).ok_or_else(|| self.bad(pointer, "three numbers"))
    }

    /// `image_mean` and `image_std`, one half in each channel where they are absent.
    ///
    /// # Errors
    /// When they are no numbers, or a deviation is zero.
    pub fn mean_std(&self) -> Result<[[f64; 3]; 2]> {
        let three = |pointer| Ok(self.triple(pointer)?.unwrap_or([0.5; 3]));
        let both: [[f64; 3]; 2] = [three("/image_mean")?, three("/image_std")?];
        if both[1].contains(&0.0) {
            return Err(self.bad("/image_std", "no zeros"));
        }
        Ok(both)
    }

    /// The name of `resample`, a number of Pillow's; none when it is absent.
    ///
    /// # Errors
    /// When the host has no such filter.
    pub fn resample(&self) -> Result<Option<&'static str>> {
        match self.get("/resample").map(Value::as_u64) {
            None => Ok(None),
            Some(Some(1)) => Ok(Some("lanczos")),
            Some(Some(2)) => Ok(Some("bilinear")),
            Some(Some(3)) => Ok(Some("bicubic")),
            Some(_) => Err(self.bad("/resample", "1 (Lanczos), 2 (bilinear) or 3 (bicubic)")),
        }
    }

    /// Checks that the value at a pointer is `expected`, if it is there.
    ///
    /// # Errors
    /// When it is another one.
    pub fn only(&self, pointer: &str, expected: &Value) -> Result<()> {
        match self.get(pointer) {
            Some(found) if found != expected => Err(self.bad(pointer, &expected.to_string())),
            _ => Ok(()),
        }
    }

    /// An error that says what the value at a pointer is and what was expected of it.
    pub fn bad(&self, pointer: &str, expected: &str) -> Error {
        let key = pointer.trim_start_matches('/').replace('/', ".");
        let found = self.get(pointer).unwrap_or(&Value::Null);
        self.fault(&format!("{key} is {found}, expected {expected}"))
    }

    /// An error of the file.
    pub fn fault(&self, what: &str) -> Error {
        let part = self.part.map_or_else(String::new, |part| format!("{part}: "));
        Error::new(ErrorKind::Artifact, format!("{}: {part}{what}", self.path.display()))
    }
}

/// The added tokens of a checkpoint with their numbers: those of `tokenizer.json`, or of `tokenizer_config.json`. None
/// of a synthetic model.
///
/// # Errors
/// When a file cannot be read.
pub fn added_tokens(checkpoint: &Checkpoint) -> Result<Vec<(String, usize)>> {
    let files =
        [("tokenizer.json", "added_tokens"), ("tokenizer_config.json", "added_tokens_decoder")];
    for (file, list) in files {
        let path = checkpoint.dir().join(file);
        if checkpoint.seed().is_some() || !path.is_file() {
            continue;
        }
        let content = |token: &Value| token["content"].as_str().map(str::to_owned);
        let mut found = Vec::new();
        match read_json(&path)?.get(list) {
            Some(Value::Array(tokens)) => {
                let one = |token: &Value| Some((content(token)?, token["id"].as_u64()? as usize));
                found.extend(tokens.iter().filter_map(one));
            }
            Some(Value::Object(tokens)) => {
                let one =
                    |(id, token): (&String, &Value)| Some((content(token)?, id.parse().ok()?));
                found.extend(tokens.iter().filter_map(one));
            }
            _ => {}
        }
        if !found.is_empty() {
            return Ok(found);
        }
    }
    Ok(Vec::new())
}
