//! Responses that later ones go on from: in memory, bounded, each for the key that asked for it.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use serde_json::Value;

use crate::error::{ApiError, Result};

/// Bytes of all stored responses, in equal parts for the keys.
const MAX_BYTES: usize = 64 << 20;
/// Bytes that a response takes besides its texts.
const OVERHEAD: usize = 512;

/// The number of a key; without keys all clients are one.
pub(crate) type Owner = Option<u64>;

/// A response with what it went on from.
#[derive(Debug)]
pub(crate) struct StoredResponse {
    /// The items of the request, and the response, as JSON: values take several times as much memory.
    input: String,
    response: String,
    /// Ids of its items, those of the request included.
    ids: Vec<String>,
    previous: Option<Arc<Self>>,
    /// Bytes of its owner's responses.
    total: Arc<AtomicUsize>,
}

impl StoredResponse {
    fn bytes(&self) -> usize {
        // An id stands in the index, too.
        let ids: usize = self.ids.iter().map(|id| 2 * id.len() + OVERHEAD / 4).sum();
        self.input.len() + self.response.len() + ids + OVERHEAD
    }

    /// The response.
    pub(crate) fn response(&self) -> Value {
        serde_json::from_str(&self.response).unwrap_or_default()
    }

    /// The items of its request.
    pub(crate) fn input(&self) -> Vec<Value> {
        serde_json::from_str(&self.input).unwrap_or_default()
    }

    /// The items of its request and its own.
    fn items(&self) -> Vec<Value> {
        let mut items = self.input();
        if let Value::Array(output) = self.response()["output"].take() {
            items.extend(output);
        }
        items
    }

    /// All items of the conversation so far, those of the response included.
    pub(crate) fn conversation(&self) -> Vec<Value> {
        let mut chain = vec![self];
        while let Some(previous) = chain.last().and_then(|last| last.previous.as_deref()) {
            chain.push(previous);
        }
        chain.into_iter().rev().flat_map(Self::items).collect()
    }
}

impl Drop for StoredResponse {
    fn drop(&mut self) {
        self.total.fetch_sub(self.bytes(), Ordering::Relaxed);
        // Without recursion, however long the conversation is.
        let mut previous = self.previous.take();
        while let Some(Ok(mut last)) = previous.map(Arc::try_unwrap) {
            previous = last.previous.take();
        }
    }
}

/// The responses of one owner.
#[derive(Debug, Default)]
struct Shelf {
    responses: HashMap<String, Arc<StoredResponse>>,
    /// Their ids, the oldest first.
    order: VecDeque<String>,
    /// The response that has an item, the latest where there are several.
    items: HashMap<String, String>,
    total: Arc<AtomicUsize>,
}

impl Shelf {
    fn take(&mut self, id: &str) -> Option<Arc<StoredResponse>> {
        let stored = self.responses.remove(id)?;
        for item in &stored.ids {
            if self.items.get(item).is_some_and(|of| of == id) {
                self.items.remove(item);
            }
        }
        Some(stored)
    }
}

/// Responses by their ids.
#[derive(Debug)]
pub(crate) struct StoredResponses {
    shelves: Mutex<HashMap<Owner, Shelf>>,
    /// Bytes of each owner's.
    max: usize,
}

impl StoredResponses {
    /// For a server with this many keys.
    pub(crate) fn new(keys: usize) -> Self {
        Self { shelves: Mutex::default(), max: MAX_BYTES / keys.max(1) }
    }

    fn with<T>(&self, owner: Owner, work: impl FnOnce(&mut Shelf) -> T) -> T {
        let mut shelves = self.shelves.lock().unwrap_or_else(PoisonError::into_inner);
        work(shelves.entry(owner).or_default())
    }

    /// Stores a response in the place of the oldest ones. False where it is larger than all of them may be.
    pub(crate) fn keep(
        &self,
        owner: Owner,
        id: &str,
        previous: Option<Arc<StoredResponse>>,
        input: &[Value],
        response: &Value,
    ) -> bool {
        let output = response["output"].as_array().into_iter().flatten();
        let ids = input.iter().chain(output).filter_map(|item| item["id"].as_str());
        let ids: Vec<_> = ids.map(str::to_owned).collect();
        let input = serde_json::to_string(input).unwrap_or_default();
        let response = response.to_string();
        let dropped = self.with(owner, |shelf| {
            let total = Arc::clone(&shelf.total);
            let stored = StoredResponse { input, response, ids, previous, total };
            shelf.total.fetch_add(stored.bytes(), Ordering::Relaxed);
            if stored.bytes() > self.max {
                return Err(stored);
            }
            let items = stored.ids.iter().map(|item| (item.clone(), id.to_owned()));
            shelf.items.extend(items);
            shelf.responses.insert(id.to_owned(), Arc::new(stored));
            shelf.order.push_back(id.to_owned());
            let mut dropped = Vec::new();
            let mut total = shelf.total.load(Ordering::Relaxed);
            while total > self.max && shelf.order.len() > 1 {
                let Some(oldest) = shelf.order.pop_front() else { break };
                // What later ones go on from stays with them, and goes with the last of them.
                let Some(oldest) = shelf.take(&oldest) else { continue };
                match Arc::try_unwrap(oldest) {
                    Ok(oldest) => {
                        total = total.saturating_sub(oldest.bytes());
                        dropped.push(oldest);
                    }
                    Err(_) => total = shelf.total.load(Ordering::Relaxed),
                }
            }
            Ok(dropped)
        });
        dropped.is_ok()
    }

    /// A response of this owner.
    pub(crate) fn find(&self, owner: Owner, id: &str) -> Option<Arc<StoredResponse>> {
        self.with(owner, |shelf| shelf.responses.get(id).cloned())
    }

    /// The same, for the field that names it.
    ///
    /// # Errors
    /// When there is none.
    pub(crate) fn previous(&self, owner: Owner, id: &str) -> Result<Arc<StoredResponse>> {
        self.find(owner, id).ok_or_else(|| {
            let message = format!(
                "there is no response {id:?}: it was not stored, or was removed for later ones; send the whole \
                 conversation as input"
            );
            ApiError::bad("previous_response_id", message).code("previous_response_not_found")
        })
    }

    /// Forgets a response. False where there is none.
    pub(crate) fn remove(&self, owner: Owner, id: &str) -> bool {
        let removed = self.with(owner, |shelf| {
            shelf.order.retain(|one| one != id);
            shelf.take(id)
        });
        removed.is_some()
    }

    /// The items beside one with this id, of the same response and request.
    fn beside(&self, owner: Owner, id: &str) -> Vec<Value> {
        let stored = self.with(owner, |shelf| {
            shelf.items.get(id).and_then(|of| shelf.responses.get(of)).cloned()
        });
        stored.map_or_else(Vec::new, |stored| stored.items())
    }
}

/// Items that a request refers to, each once: a short request cannot become a conversation of any size. Each response
/// with some of them is read once.
pub(crate) struct References<'a> {
    stored: &'a StoredResponses,
    owner: Owner,
    /// Items by their ids, `None` for one that was returned.
    found: HashMap<String, Option<Value>>,
}

impl<'a> References<'a> {
    pub(crate) fn new(stored: &'a StoredResponses, owner: Owner) -> Self {
        Self { stored, owner, found: HashMap::new() }
    }

    /// The stored item with an id; `None` where there is none, and the second time.
    pub(crate) fn item(&mut self, id: &str) -> Option<Value> {
        if !self.found.contains_key(id) {
            for item in self.stored.beside(self.owner, id) {
                if let Some(id) = item["id"].as_str() {
                    let id = id.to_owned();
                    self.found.entry(id).or_insert(Some(item));
                }
            }
        }
        self.found.get_mut(id)?.take()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn keep(
        store: &StoredResponses,
        owner: Owner,
        id: &str,
        previous: Option<&str>,
        bytes: usize,
    ) -> bool {
        let previous = previous.and_then(|id| store.find(owner, id));
        let input = [json!({"id": format!("in_{id}"), "text": "x".repeat(bytes)})];
        let response = json!({"id": id, "output": [{"id": format!("out_{id}")}]});
        store.keep(owner, id, previous, &input, &response)
    }

    #[test]
    fn what_is_stored_is_bounded_and_each_owners_own() {
        let store = StoredResponses { max: 100_000, ..StoredResponses::new(0) };
        let total = |owner| store.with(owner, |shelf| shelf.total.load(Ordering::Relaxed));
        assert!(keep(&store, None, "a", None, 10) && keep(&store, None, "b", Some("a"), 10));
        let ids: Vec<_> = store.find(None, "b").unwrap().conversation();
        let ids: Vec<_> = ids.iter().map(|item| item["id"].as_str().unwrap()).collect();
        assert_eq!(ids, ["in_a", "out_a", "in_b", "out_b"]);
        assert!(store.find(Some(1), "a").is_none() && store.previous(Some(1), "a").is_err());
        let mut references = References::new(&store, None);
        assert!(references.item("in_a").is_some() && references.item("in_a").is_none());
        assert!(references.item("out_a").is_some() && references.item("in_b").is_some());
        let item = |owner, id| References::new(&store, owner).item(id);
        assert_eq!(item(None, "out_a").unwrap()["id"], "out_a");
        assert_eq!(item(None, "in_b").unwrap()["id"], "in_b");
        assert!(item(Some(1), "out_a").is_none() && item(None, "out").is_none());
        // A response that others go on from stays with them.
        assert!(store.remove(None, "a") && !store.remove(None, "a"));
        assert_eq!(store.find(None, "b").unwrap().conversation().len(), 4);
        assert!(item(None, "in_a").is_none());
        assert!(store.remove(None, "b"));
        assert_eq!(total(None), 0);
        assert!(store.with(None, |shelf| shelf.items.is_empty()));
        for number in 0..1000 {
            let id = number.to_string();
            let before = (number % 3 != 0).then(|| (number - 1).to_string());
            assert!(keep(&store, Some(2), &id, before.as_deref(), 3000));
            assert!(total(Some(2)) <= 104_000, "{number}: {}", total(Some(2)));
        }
        assert!(store.find(Some(2), "999").is_some() && store.find(Some(2), "0").is_none());
        assert!(!keep(&store, Some(2), "large", None, 200_000) && total(Some(2)) <= 104_000);
        // A conversation without end.
        let store = StoredResponses::new(0);
        for number in 0..50_000 {
            let before = (number - 1).to_string();
            assert!(keep(&store, None, &number.to_string(), Some(before.as_str()), 10));
        }
        drop(store);
    }
}
