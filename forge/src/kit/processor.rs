//! The files that say how images, videos and audio become numbers.

use std::path::PathBuf;

use qhx_base::{Error, ErrorKind, Result};
use qhx_checkpoint::{Checkpoint, read_json};
use serde_json::Value;

use super::same;

/// File that `transformers` 5 saves, with an object for each part.
const WHOLE: &str = "processor_config.json";
/// Sizes, objects or single numbers.
const SIZES: [&str; 3] = ["size", "crop_size", "max_image_size"];

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
                return Self { path, part: Some(part), value: whole[*part].take() }.checked();
            }
        }
        if let Some(path) = files.iter().map(|file| dir.join(file)).find(|path| path.is_file()) {
            return Self { value: read_json(&path)?, path, part: None }.checked();
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

    /// Checks the types of switches and sizes, whoever reads them.
    fn checked(self) -> Result<Self> {
        for (key, value) in self.value.as_object().into_iter().flatten() {
            let switch = key.starts_with("do_") && !value.is_boolean();
            let size = SIZES.contains(&&**key)
                && !value.is_object()
                && value.as_u64().is_none_or(|size| size == 0);
            if !value.is_null() && (switch || size) {
                let expected =
                    if switch { "true or false" } else { "an object or a number above 0" };
                return Err(self.bad(&format!("/{key}"), expected));
            }
        }
        Ok(self)
    }

    /// Checks that images are resized, rescaled by 1/255 and normalised, where the file says anything of it.
    ///
    /// # Errors
    /// When they are not.
    pub fn usual_steps(&self) -> Result<()> {
        for key in ["/do_resize", "/do_rescale", "/do_normalize"] {
            self.only(key, &Value::Bool(true))?;
        }
        self.scale_of_bytes()
    }

    /// Checks that bytes are divided by 255.
    ///
    /// # Errors
    /// When they are not.
    pub fn scale_of_bytes(&self) -> Result<()> {
        if (self.rescale_factor()? * 255.0 - 1.0).abs() > 1e-6 {
            return Err(self.bad("/rescale_factor", "1/255"));
        }
        Ok(())
    }

    /// `rescale_factor`, 1/255 where it is absent.
    ///
    /// # Errors
    /// When it is no positive number.
    pub fn rescale_factor(&self) -> Result<f64> {
        let Some(value) = self.get("/rescale_factor") else { return Ok(1.0 / 255.0) };
        let positive = value.as_f64().filter(|scale| (*scale as f32).is_normal() && *scale > 0.0);
        positive.ok_or_else(|| self.bad("/rescale_factor", "a positive number"))
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
        let number = |value: &Value| value.as_f64().filter(|n| (*n as f32).is_finite());
        let numbers: Option<Vec<f64>> =
            value.as_array().and_then(|list| list.iter().map(number).collect());
        let numbers = numbers.and_then(|list| <[f64; 3]>::try_from(list).ok());
        numbers.map(Some).ok_or_else(|| self.bad(pointer, "three numbers"))
    }

    /// `image_mean` and `image_std`, one half in each channel where they are absent.
    ///
    /// # Errors
    /// When they are no numbers, or a deviation is not above zero.
    pub fn mean_std(&self) -> Result<[[f64; 3]; 2]> {
        self.mean_std_or([[0.5; 3]; 2])
    }

    /// The same, with defaults of a class.
    ///
    /// # Errors
    /// Errors of [`Processor::mean_std`].
    pub fn mean_std_or(&self, default: [[f64; 3]; 2]) -> Result<[[f64; 3]; 2]> {
        let three = |pointer, default| Ok(self.triple(pointer)?.unwrap_or(default));
        let both: [[f64; 3]; 2] =
            [three("/image_mean", default[0])?, three("/image_std", default[1])?];
        if both[1].iter().any(|std| (*std as f32) < f32::MIN_POSITIVE) {
            return Err(self.bad("/image_std", "three numbers above 0"));
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
            Some(found) if !same(found, expected) => Err(self.bad(pointer, &expected.to_string())),
            _ => Ok(()),
        }
    }

    /// The same for several pointers.
    ///
    /// # Errors
    /// When one has another value.
    pub fn only_all<const N: usize>(&self, expected: [(&str, Value); N]) -> Result<()> {
        expected.iter().try_for_each(|(pointer, value)| self.only(pointer, value))
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
