//! Memory for request bodies: how much there is, and who waits for it.
//!
//! | memory | taken | by |
//! |---|---|---|
//! | bytes | as they arrive, behind the first 64 KiB of a body | bodies whose client may dawdle |
//! | contents of large bodies | at once, when the last byte is there | bodies that wait for no client |
//! | contents of small bodies | the same | the same, so that they do not wait behind large ones |
//! | answers beyond 64 KiB | when they are written | lists of tokens and their texts, which can be many times the body |
//! | what requests keep | when they are read, until they end | compiled grammars, and what an answer repeats of its request |
//!
//! What a client announces takes nothing, and the first bytes of a body no more than its connection has for its head.
//! Bodies that hold bytes and wait for more could wait for each other for ever, so there is room for one body of the
//! largest size beside the others: whoever gets it can be read to its end. Answers wait for nothing, because their readers may
//! dawdle, and what waited for them would hold its body meanwhile. Nor does what requests keep: they may be in the queue for long.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use tokio::runtime::Handle;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::protocol::ApiError;

/// Memory is counted in pieces of this size.
const PIECE_BYTES: usize = 1024;

/// Bodies up to this size, and as much of larger ones, need no memory to arrive. Nor do answers up to this size.
const SMALL_BODY_BYTES: usize = 64 << 10;

/// About as much as a value of JSON takes, with its share of the list or object it is in, and with copies on the way to
/// where it is read. A number is a value too: only in lists of token ids it takes less.
const VALUE_BYTES: usize = 256;

/// Bodies from this size leave so much in the allocator, on whichever thread parsed them, that it is given back.
const LARGE_BODY_BYTES: usize = 256 << 10;

/// How long after a large body its memory is given back. Bodies that come until then share the work.
const TRIM_DELAY: Duration = Duration::from_secs(2);

/// How many times the memory for bodies there is for what requests keep until they end.
const KEPT_SHARE: usize = 4;

/// The memory for all bodies, and for what requests keep of them.
#[derive(Debug)]
pub(crate) struct BodyBudget {
    /// Bytes that may arrive beside those of the body that has [`Self::room`].
    bytes: Arc<Semaphore>,
    /// The room for one body of the largest size.
    room: Arc<Semaphore>,
    large: Pool,
    small: Pool,
    answers: Pool,
    kept: Pool,
    trim: Trim,
}

/// Memory that is taken at once by those who wait for nothing else.
#[derive(Debug)]
struct Pool {
    pieces: Arc<Semaphore>,
    size: usize,
}

/// Gives memory that bodies and requests have left back to the system.
#[derive(Clone, Debug, Default)]
struct Trim {
    planned: Arc<AtomicBool>,
}

/// What a request keeps until it ends, of the memory for all of them. Much of it goes back to the system some time after it
/// is dropped, on whichever thread that is.
#[derive(Debug)]
pub(crate) struct KeptMemory {
    bytes: usize,
    trim: Trim,
    runtime: Option<Handle>,
    _pieces: OwnedSemaphorePermit,
}

/// What a body takes of the memory for all. What a large one took goes back to the system some time after it is dropped.
#[derive(Debug)]
pub(crate) struct BodyMemory {
    budget: Arc<BodyBudget>,
    /// The bytes that have arrived, and those of them that are text.
    len: usize,
    text_len: usize,
    bytes: Option<OwnedSemaphorePermit>,
    room: Option<OwnedSemaphorePermit>,
    contents: Option<OwnedSemaphorePermit>,
    /// How long it may still wait for memory.
    patience: Duration,
}

impl BodyBudget {
    /// Memory for bodies of `all` bytes together, of which one may have `largest`.
    pub(crate) fn new(all: usize, largest: usize) -> Arc<BodyBudget> {
        Arc::new(BodyBudget {
            bytes: Arc::new(Semaphore::new(pieces(all.saturating_sub(largest)))),
            room: Arc::new(Semaphore::new(1)),
            large: Pool::new(all.max(largest)),
            small: Pool::new(all / 4),
            answers: Pool::new(all.max(largest)),
            kept: Pool::new(all.saturating_mul(KEPT_SHARE).max(largest)),
            trim: Trim::default(),
        })
    }

    /// What a body takes before it has begun. It waits no longer than `patience` in all.
    pub(crate) fn body(self: &Arc<Self>, patience: Duration) -> BodyMemory {
        let budget = Arc::clone(self);
        BodyMemory { budget, len: 0, text_len: 0, bytes: None, room: None, contents: None, patience }
    }

    /// An answer that takes memory until the last byte of it has been sent, or is refused because others have it.
    pub(crate) fn answer(&self, mut answer: Vec<u8>) -> Result<Bytes, ApiError> {
        if answer.len() <= SMALL_BODY_BYTES {
            return Ok(answer.into());
        }
        answer.shrink_to_fit();
        let memory = self.answers.take_now(answer.len()).ok_or_else(ApiError::no_body_memory)?;
        Ok(Bytes::from_owner(CountedAnswer { answer, _memory: memory }))
    }

    /// Memory for `bytes` that a request keeps until it ends, or an error because others have it, or because there is not so
    /// much at all.
    pub(crate) fn keep(&self, bytes: usize) -> Result<KeptMemory, ApiError> {
        if pieces(bytes) > self.kept.size {
            return Err(ApiError::too_much_kept(bytes, self.kept.size * PIECE_BYTES));
        }
        let pieces = self.kept.take_now(bytes).ok_or_else(ApiError::no_request_memory)?;
        Ok(KeptMemory {
            bytes,
            trim: self.trim.clone(),
            runtime: Handle::try_current().ok(),
            _pieces: pieces,
        })
    }
}

/// The bytes of an answer with the memory that they take.
struct CountedAnswer {
    answer: Vec<u8>,
    _memory: OwnedSemaphorePermit,
}

impl AsRef<[u8]> for CountedAnswer {
    fn as_ref(&self) -> &[u8] {
        &self.answer
    }
}

impl Pool {
    fn new(bytes: usize) -> Pool {
        let size = pieces(bytes).max(1);
        Pool { pieces: Arc::new(Semaphore::new(size)), size }
    }

    /// Takes memory if there is enough. Whoever needs more than all of it takes all of it.
    fn take_now(&self, bytes: usize) -> Option<OwnedSemaphorePermit> {
        let pieces = u32::try_from(pieces(bytes).min(self.size)).unwrap_or(u32::MAX);
        Arc::clone(&self.pieces).try_acquire_many_owned(pieces).ok()
    }
}

impl BodyMemory {
    /// The bytes of the body.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// About as many bytes of it as there are in texts, as far as [`Self::hold_contents`] has been told.
    pub(crate) fn text_len(&self) -> usize {
        self.text_len
    }

    /// Takes memory for `more` bytes that have arrived.
    pub(crate) async fn grow(&mut self, more: usize) -> Result<(), ApiError> {
        self.len += more;
        let held = self.bytes.as_ref().map_or(0, OwnedSemaphorePermit::num_permits);
        let needed = pieces(self.len.saturating_sub(SMALL_BODY_BYTES)).saturating_sub(held);
        if needed == 0 || self.room.is_some() {
            return Ok(());
        }
        let budget = Arc::clone(&self.budget);
        let either = async {
            tokio::select! {
                biased;
                bytes = take(&budget.bytes, needed) => (bytes, false),
                room = take(&budget.room, 1) => (room, true),
            }
        };
        let (taken, is_room) = self.wait(either).await?;
        match &mut self.bytes {
            _ if is_room => self.room = Some(taken?),
            Some(bytes) => bytes.merge(taken?),
            none => *none = Some(taken?),
        }
        Ok(())
    }

    /// Takes memory for what the body is parsed to. All its bytes have arrived, `text_len` of them in texts.
    pub(crate) async fn hold_contents(&mut self, values: usize, text_len: usize) -> Result<(), ApiError> {
        self.text_len = text_len;
        let budget = Arc::clone(&self.budget);
        let pool = if self.len <= SMALL_BODY_BYTES { &budget.small } else { &budget.large };
        let pieces = pieces(values.saturating_mul(VALUE_BYTES)).min(pool.size);
        self.contents = Some(self.wait(take(&pool.pieces, pieces)).await??);
        Ok(())
    }

    /// Waits, but not for ever.
    async fn wait<T>(&mut self, taken: impl Future<Output = T>) -> Result<T, ApiError> {
        let begun = Instant::now();
        let taken = tokio::time::timeout(self.patience, taken).await;
        self.patience = self.patience.saturating_sub(begun.elapsed());
        taken.map_err(|_| ApiError::no_body_memory())
    }
}

impl Drop for BodyMemory {
    fn drop(&mut self) {
        if let Ok(runtime) = Handle::try_current() {
            self.budget.trim.after(self.len, &runtime);
        }
    }
}

impl Drop for KeptMemory {
    fn drop(&mut self) {
        if let Some(runtime) = &self.runtime {
            self.trim.after(self.bytes, runtime);
        }
    }
}

impl Trim {
    /// Plans it behind the end of what had so many bytes, unless they are few.
    fn after(&self, bytes: usize, runtime: &Handle) {
        if bytes < LARGE_BODY_BYTES || self.planned.swap(true, Ordering::SeqCst) {
            return;
        }
        let planned = Arc::clone(&self.planned);
        runtime.spawn(async move {
            tokio::time::sleep(TRIM_DELAY).await;
            planned.store(false, Ordering::SeqCst);
            tokio::task::spawn_blocking(oscar_engine::trim_memory).await
        });
    }
}

fn pieces(bytes: usize) -> usize {
    bytes.div_ceil(PIECE_BYTES).min(u32::MAX as usize).min(Semaphore::MAX_PERMITS)
}

async fn take(from: &Arc<Semaphore>, pieces: usize) -> Result<OwnedSemaphorePermit, ApiError> {
    let pieces = u32::try_from(pieces).unwrap_or(u32::MAX);
    Arc::clone(from).acquire_many_owned(pieces).await.map_err(|error| ApiError::internal(&error))
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;
    use futures_util::future::join_all;

    use super::*;

    const SOON: Duration = Duration::from_millis(20);
    const LONG: Duration = Duration::from_secs(20);

    /// Takes what can be taken without waiting.
    fn now<T>(taken: impl Future<Output = Result<T, ApiError>>) -> Option<T> {
        taken.now_or_never().map(Result::unwrap)
    }

    #[tokio::test]
    async fn bodies_take_what_has_arrived() {
        let budget = BodyBudget::new(4 << 20, 1 << 20);
        let mut bodies: Vec<BodyMemory> = (0..5000).map(|_| budget.body(SOON)).collect();
        for body in &mut bodies {
            now(body.grow(SMALL_BODY_BYTES)).unwrap();
        }
        assert_eq!(budget.bytes.available_permits(), 3 << 10);
        now(bodies[0].grow(1 << 20)).unwrap();
        assert_eq!(budget.bytes.available_permits(), 2 << 10);
        drop(bodies);
        assert_eq!(budget.bytes.available_permits(), 3 << 10);
    }

    #[tokio::test]
    async fn whoever_waits_too_long_is_told_so() {
        let budget = BodyBudget::new(2 << 20, 1 << 20);
        let mut others = [budget.body(SOON), budget.body(SOON)];
        for other in &mut others {
            now(other.grow((1 << 20) + SMALL_BODY_BYTES)).unwrap();
        }
        let mut late = budget.body(SOON);
        now(late.grow(SMALL_BODY_BYTES)).unwrap();
        let error = late.grow(1).await.unwrap_err();
        assert_eq!((error.status().as_u16(), error.code()), (503, Some("body_memory")));
        drop(others);
        assert!(budget.body(SOON).grow(1 << 20).await.is_ok());
    }

    /// Together they need four times what there is, and each has a part of it before it waits.
    #[tokio::test]
    async fn bodies_that_have_begun_all_come_to_their_end() {
        let budget = BodyBudget::new(2 << 20, 1 << 20);
        let body = async || {
            let mut memory = budget.body(LONG);
            for _ in 0..16 {
                memory.grow(64 << 10).await?;
                tokio::task::yield_now().await;
            }
            memory.hold_contents(1000, 0).await
        };
        assert!(join_all((0..8).map(|_| body())).await.iter().all(Result::is_ok));
    }

    #[tokio::test]
    async fn contents_are_counted_by_their_values() {
        let budget = BodyBudget::new(4 << 20, 1 << 20);
        let full = |len: usize| {
            let mut memory = budget.body(SOON);
            now(memory.grow(len)).unwrap();
            memory
        };
        // 8 bytes of JSON for each value, and more memory for it than there is: it has all there is for itself.
        let (mut first, mut second) = (full(256 << 10), full(256 << 10));
        now(first.hold_contents(32 << 10, 0)).unwrap();
        assert!(second.hold_contents(32 << 10, 0).await.is_err());
        // One long text is one value, and small bodies have memory of their own.
        assert!(full(256 << 10).hold_contents(1, 0).await.is_err());
        full(1000).hold_contents(30, 0).await.unwrap();
        drop(first);
        full(256 << 10).hold_contents(1, 0).await.unwrap();
    }

    #[test]
    fn answers_take_memory_until_they_are_sent() {
        let budget = BodyBudget::new(2 << 20, 1 << 20);
        let answer = |len: usize| budget.answer(vec![b'a'; len]);
        let first = answer(1 << 20).unwrap();
        let mut second = answer(1 << 20).unwrap();
        let error = answer(SMALL_BODY_BYTES + 1).unwrap_err();
        assert_eq!((error.status().as_u16(), error.code()), (503, Some("body_memory")));
        assert_eq!(answer(SMALL_BODY_BYTES).unwrap().len(), SMALL_BODY_BYTES);
        drop(first);
        // What is written to a connection in parts is there until the last of them is.
        let half = second.split_to(1 << 19);
        drop(second);
        assert!(answer(1 << 20).is_ok() && answer((1 << 20) + 1).is_err());
        drop(half);
        assert!(answer(2 << 20).is_ok());
    }

    #[tokio::test]
    async fn what_requests_keep_is_bounded() {
        let budget = BodyBudget::new(2 << 20, 1 << 20);
        let first = budget.keep(5 << 20).unwrap();
        assert!(!budget.trim.planned.load(Ordering::SeqCst));
        let error = budget.keep(4 << 20).unwrap_err();
        assert_eq!((error.status().as_u16(), error.code()), (503, Some("request_memory")));
        // A request may end on a thread of the engine.
        std::thread::spawn(move || drop(first)).join().unwrap();
        assert!(budget.trim.planned.load(Ordering::SeqCst));
        assert_eq!(budget.keep((8 << 20) + 1).unwrap_err().status().as_u16(), 400);
        let all = budget.keep(8 << 20).unwrap();
        assert!(budget.keep(1).is_err());
        drop(all);
        assert!(budget.keep(0).is_ok());
        // What a body of the largest size asks for can be kept, however little there is for all.
        assert!(BodyBudget::new(64 << 10, 32 << 20).keep(32 << 20).is_ok());
    }
}
