//! Files that `tests/oracle/media.py` made, and what it says of them.

use std::path::PathBuf;

use qhx_media::Source;

pub fn fixture(name: &str) -> PathBuf {
    qhx_paths::workspace().join("tests/fixtures/media").join(name)
}

#[allow(dead_code, reason = "not every test reads files")]
pub fn file(name: &str) -> Source {
    Source::File(fixture(name))
}

#[allow(dead_code, reason = "not every test reads images")]
pub fn golden(name: &str) -> image::RgbImage {
    image::open(fixture(&format!("{name}.png"))).unwrap().into_rgb8()
}
