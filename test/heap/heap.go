// Package heap measures memory in tests.
package heap

import "runtime"

// InUse returns the bytes of objects on the heap, after a collection.
func InUse() int64 {
	runtime.GC()
	runtime.GC() // frees what the first one finalized
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}
