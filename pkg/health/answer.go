package health

import (
	"encoding/json"
	"net/http"
)

// status returns the HTTP status of a result.
func status(healthy bool) int {
	if healthy {
		return http.StatusOK
	}
	return http.StatusServiceUnavailable
}

// answerJSON writes a JSON response. The body must be marshallable.
func answerJSON(w http.ResponseWriter, code int, body any) {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.WriteHeader(code)
	// Only the client's connection can fail here.
	_ = json.NewEncoder(w).Encode(body)
}
