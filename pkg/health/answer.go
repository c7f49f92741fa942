package health

import (
	"encoding/json"
	"net/http"
)

// status is that of an answer.
func status(healthy bool) int {
	if healthy {
		return http.StatusOK
	}
	return http.StatusServiceUnavailable
}

// answerJSON writes an answer. The body is one that can be marshalled.
func answerJSON(w http.ResponseWriter, code int, body any) {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.WriteHeader(code)
	// What fails here is the client's connection, of which nobody is to be told.
	_ = json.NewEncoder(w).Encode(body)
}
