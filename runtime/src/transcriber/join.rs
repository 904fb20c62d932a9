//! Words of chunks that overlap, joined at their borders.

/// Words at the end of a chunk, and at the beginning of the next one, that the border may have damaged.
const DAMAGED: usize = 2;

/// Appends the words of a chunk to those of the chunks before it, without those that both have at the border.
///
/// The border may cut a word in two, which the model then hears otherwise: up to [`DAMAGED`] words on either side of
/// what both have are dropped, too, unless it is a single word. The overlap holds no more than `max` words: what
/// speakers repeat stays.
pub(super) fn join(whole: &mut String, next: &str, max: usize) {
    let before: Vec<String> = whole.split_whitespace().map(str::to_owned).collect();
    let words: Vec<&str> = next.split_whitespace().collect();
    let (kept, skipped) = border(&before, &words, max);
    let words = before.iter().take(kept).map(String::as_str).chain(words.into_iter().skip(skipped));
    *whole = words.collect::<Vec<_>>().join(" ");
}

/// End of the words that no further chunk changes: the last ones may be damaged.
pub(super) fn settled(whole: &str) -> usize {
    whole.rmatch_indices(' ').nth(DAMAGED - 1).map_or(0, |(at, _)| at)
}

/// Number of words of `before` to keep, and of `words` to skip; the overlap holds at most `max`.
fn border(before: &[String], words: &[&str], max: usize) -> (usize, usize) {
    let bare = |word: &str| {
        word.chars()
            .filter(|c| c.is_alphanumeric())
            .flat_map(char::to_lowercase)
            .collect::<String>()
    };
    let first = before.len().saturating_sub(max);
    let ends: Vec<_> = before.iter().skip(first).map(|word| bare(word)).collect();
    let begins: Vec<_> = words.iter().take(max).map(|word| bare(word)).collect();
    // The more words are the same and the fewer are dropped, the better.
    let mut best = (None, before.len(), 0);
    for from in 0..ends.len() {
        for skipped in 0..begins.len().min(DAMAGED + 1) {
            let pairs = ends.iter().skip(from).zip(begins.iter().skip(skipped));
            let same = pairs.take_while(|(a, b)| a == b).count();
            let dropped = ends.len() - from - same + skipped;
            let fits = ends.len() - from - same <= DAMAGED && (dropped == 0 || same > 1);
            let score = same.checked_sub(dropped).filter(|_| fits && same > 0);
            if score > best.0 {
                best = (score, first + from + same, skipped + same);
            }
        }
    }
    (best.1, best.2)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn joined(chunks: &[&str]) -> String {
        let mut whole = String::new();
        chunks.iter().for_each(|chunk| join(&mut whole, chunk, 20));
        whole
    }

    #[test]
    fn words_that_two_chunks_have_in_common_are_written_once() {
        let chunks = ["The boat leaves", "leaves at noon.", "At noon, it rains", "", "it pours"];
        assert_eq!(joined(&chunks), "The boat leaves at noon. it rains it pours");
        assert_eq!(joined(&["a rose is a rose", "a rose is red"]), "a rose is a rose is red");
        assert_eq!(joined(&["one two", "three four"]), "one two three four");
    }

    #[test]
    fn no_more_words_are_joined_than_the_overlap_holds() {
        let mut whole = String::new();
        (0..9).for_each(|_| join(&mut whole, "the boat leaves at noon", 2));
        assert_eq!(whole.split_whitespace().count(), 9 * 5);
        let mut whole = "the boat leaves at noon the boat leaves".to_owned();
        join(&mut whole, "boat leaves at noon the boat leaves at noon", 2);
        let expected = "the boat leaves at noon the boat leaves at noon the boat leaves at noon";
        assert_eq!(whole, expected);
    }

    #[test]
    fn words_that_the_border_cut_are_heard_in_the_other_piece() {
        let chunks = ["we go down to the har", "on to the harbour at night"];
        assert_eq!(joined(&chunks), "we go down to the harbour at night");
        // One word in common among others is chance.
        assert_eq!(joined(&["see the sea", "and the moon"]), "see the sea and the moon");
    }
}
