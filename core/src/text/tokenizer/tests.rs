//! Tokenizers, good and hostile.

use super::super::samples::byte_fallback;

#[test]
fn truncation_and_padding_of_the_file_are_off() {
    let ids = byte_fallback().encode("Hello!", true).unwrap();
    assert_eq!(ids[0], 1, "the post-processor's BOS");
    assert!(ids.len() > 3 && ids.len() < 40, "{ids:?}");
    assert_ne!(byte_fallback().encode("Hello!", false).unwrap()[0], 1);
}
